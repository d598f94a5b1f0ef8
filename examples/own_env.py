"""Your own environment: the geometry of moves in six short methods, and two more that list the states. No chance, no reward, no `done`.

Here the objects are sets: at most `most` of n items, taken one at a time in any order, ended by STOP.

    python examples/own_env.py
    stochflow train examples.own_env:subset_task --items 8 --most 4 --steps 500
"""

import torch

from stochflow import Enumerable, Power, Slip, Task, check_env, train


class Subsets(Enumerable):
    def __init__(self, items: int, most: int):
        self.items, self.most = items, most
        self.state_dim, self.num_moves, self.horizon, self.stop = items, items + 1, most, items
        every = torch.cartesian_prod(
            *[torch.arange(2)] * items
        )  # an item more, a larger binary number: parents come first
        self.listed = every[every.sum(1) <= most]
        self.place = 2 ** torch.arange(items - 1, -1, -1)

    def initial(self, batch, row=None):
        return torch.zeros(*batch, self.items, dtype=torch.long, device=None if row is None else row.device)

    def moves(self, state):  # an item not yet taken, while there is room; STOP always
        free = (state == 0) & (state.sum(-1, keepdim=True) < self.most)
        return torch.cat([free, torch.ones_like(free[..., :1])], -1)

    def parents(self, state):  # any item of the set may have come last; never STOP
        return torch.cat([state == 1, torch.zeros_like(state[..., :1], dtype=torch.bool)], -1)

    def item(self, state, move):
        return (torch.arange(self.items, device=state.device) == move.unsqueeze(-1)).long()  # nothing for STOP

    def step(self, state, move):
        return (state + self.item(state, move)).clamp(max=1)

    def unstep(self, state, move):
        return (state - self.item(state, move)).clamp(min=0)

    def features(self, state):
        return state.float()

    def all_states(self, row=None):
        return self.listed

    def index(self, state):
        place = self.place.to(state.device)
        return torch.searchsorted((self.listed.to(state.device) * place).sum(-1), (state * place).sum(-1))


def subset_task(items: int = 6, most: int = 3, stick: float = 0.1) -> Task:
    """Sets of items drawn in proportion to the product of their weights 1, 2, ..., n."""
    weight = torch.arange(1.0, items + 1).log()

    def product(state):
        return (state * weight.to(state.device)).sum(-1).exp()

    return Task(Subsets(items, most), Slip(stick), product, Power())


if __name__ == "__main__":
    print(check_env(Subsets(6, 3)))  # what it looked at; a fault would be named with the state and the move
    print(f"exact TV {train(subset_task(), steps=500, out='runs/subsets').summary['tv']:.3f}")
