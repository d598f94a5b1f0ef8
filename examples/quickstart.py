"""Train the small GFlowNet on the 16 x 16 grid and draw its samples beside the target (a few seconds on one core).

python examples/quickstart.py [num_epochs] [picture]
"""

import sys

import torch
from torch.nn.functional import one_hot
from torch.optim import Adam

from stochflow.quickstart import (
    BackwardPolicy,
    ForwardPolicy,
    GFlowNet,
    Grid,
    exact_tv,
    plot_samples,
    trajectory_balance_loss,
)

num_epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
picture = sys.argv[2] if len(sys.argv) > 2 else "samples.png"
batch_size = 256
torch.manual_seed(0)
torch.set_num_threads(1)  # these tensors are small: more threads would wait for one another

env = Grid(size=16)
forward_policy = ForwardPolicy(env.state_dim, hidden_dim=32, num_actions=3)
backward_policy = BackwardPolicy(env.state_dim, num_actions=3)
model = GFlowNet(forward_policy, backward_policy, env)
opt = Adam(model.parameters(), lr=5e-3)

for i in range(num_epochs):
    s0 = one_hot(torch.zeros(batch_size).long(), env.state_dim).float()
    s, log = model.sample_states(s0, return_log=True)
    loss = trajectory_balance_loss(log.total_flow, log.rewards, log.fwd_probs, log.back_probs)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if (i + 1) % max(1, num_epochs // 10) == 0:
        print(
            f"epoch {i + 1:5d}   loss {loss.item():9.2e}   Z {log.total_flow.item():6.2f}   exact TV {exact_tv(model):.1e}"
        )

print(f"saved {plot_samples(model, path=picture)}")
