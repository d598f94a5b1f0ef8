"""What a letter of a pattern may stand for, complements, and scales of residues."""

from __future__ import annotations

from stochflow.errors import UserError

NUCLEIC = {
    "A": "A", "C": "C", "G": "G", "T": "T", "R": "AG", "Y": "CT", "S": "CG", "W": "AT", "K": "GT", "M": "AC",
    "B": "CGT", "D": "AGT", "H": "ACT", "V": "ACG", "N": "ACGT",
}  # fmt: skip
PROTEIN = {"B": "DN", "Z": "EQ", "J": "IL"}  # X: any residue
COMPLEMENT = str.maketrans("ACGTRYSWKMBDHVN", "TGCAYRSWMKVHDBN")

# Kyte and Doolittle, J. Mol. Biol. 157 (1982) 105-132
KYTE_DOOLITTLE = {
    "A": 1.8, "R": -4.5, "N": -3.5, "D": -3.5, "C": 2.5, "Q": -3.5, "E": -3.5, "G": -0.4, "H": -3.2, "I": 4.5,
    "L": 3.8, "K": -3.9, "M": 1.9, "F": 2.8, "P": -1.6, "S": -0.8, "T": -0.7, "W": -0.9, "Y": -1.3, "V": 4.2,
}  # fmt: skip
SCALES = {"kyte-doolittle": KYTE_DOOLITTLE}


def is_nucleic(alphabet: str) -> bool:
    """Whether the alphabet is that of DNA or RNA, in any order."""
    return sorted(alphabet) in (sorted("ACGT"), sorted("ACGU"))


def stands_for(letter: str, alphabet: str) -> str:
    """The letters of the alphabet that this letter of a pattern stands for; "" if it stands for none."""
    if letter == ".":
        return alphabet
    if is_nucleic(alphabet):
        meant = NUCLEIC.get("T" if letter == "U" else letter, "")
        return meant.replace("T", "U") if "U" in alphabet else meant
    if letter in alphabet:
        return letter
    if letter == "X":
        return alphabet
    return "".join(a for a in PROTEIN.get(letter, "") if a in alphabet)


def pattern_sets(pattern: str, alphabet: str, where: str) -> tuple[str, ...]:
    """The letters allowed at each place of a pattern such as `ATGNN[AG].`; a UserError names what is not understood."""
    sets: list[str] = []
    i = 0
    while i < len(pattern):
        if pattern[i] == "[":
            end = pattern.find("]", i)
            if end < 0:
                raise UserError(
                    f"{where}: {pattern!r} opens a bracket at letter {i + 1} that it does not close: add a ]"
                )
            inside = pattern[i + 1 : end]
            i = end + 1
        else:
            inside = pattern[i]
            i += 1
        wanted = [stands_for(letter, alphabet) for letter in inside]
        if not wanted or not all(wanted):
            bad = next((letter for letter, meant in zip(inside, wanted, strict=True) if not meant), "[]")
            upper = f" (did you mean {bad.upper()!r}?)" if bad != bad.upper() else ""
            raise UserError(
                f"{where}: {bad!r} in {pattern!r} stands for no letter of the alphabet {alphabet!r}{upper}: "
                "use its letters, IUPAC codes, [..] or ."
            )
        found = {letter for meant in wanted for letter in meant}
        sets.append("".join(a for a in alphabet if a in found))
    return tuple(sets)


def reverse_complement(sets: tuple[str, ...], alphabet: str, where: str) -> tuple[str, ...]:
    """The pattern as it reads on the other strand."""
    if not is_nucleic(alphabet):
        raise UserError(
            f'{where}: there is no other strand for the alphabet {alphabet!r}: only DNA and RNA have one, so strands = "one"'
        )
    rna = "U" in alphabet
    turned = []
    for allowed in reversed(sets):
        other = allowed.replace("U", "T").translate(COMPLEMENT)
        other = other.replace("T", "U") if rna else other
        turned.append("".join(a for a in alphabet if a in other))
    return tuple(turned)
