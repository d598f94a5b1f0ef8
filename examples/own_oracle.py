"""Your own oracle: any function from a list of strings to one score each. Run it, or let the command train it:

python examples/own_oracle.py
stochflow train examples.own_oracle:gc_task --length 6 --steps 2000
"""

from stochflow import Slip, Task, strings_task, train


def gc_content(texts: list[str]) -> list[float]:
    return [(t.count("G") + t.count("C")) / len(t) for t in texts]


def gc_task(length: int = 6, stick: float = 0.1) -> Task:
    """DNA strings that are drawn in proportion to their GC content."""
    return strings_task(gc_content, alphabet="ACGT", length=length, channel=Slip(stick))


if __name__ == "__main__":
    result = train(gc_task(), steps=2000)
    print(
        f"exact TV {result.summary['tv']:.3f}, best achievable {result.summary['floor_tv']:.3f}, run folder {result.path}"
    )
    for row in result.sample(3):
        print(row["sequence"], row["score"])
