"""A run's figures as a person reads them: one number formatter, and the verdict in plain words. No torch here."""

from __future__ import annotations

import math
from typing import Any

FAR = 0.02  # excess TV from which a run is told what to try
REACHED = 1e-6  # a best achievable TV below this is zero: what a linear program leaves of it


def number(value: Any, style: str = "") -> str:
    """A figure with four decimals, fewer where it is large; whole numbers as they are. `style`: "+" shows the sign, "," groups."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):{style}d}"
    if size < 1e-3 or size >= 1e6:
        return f"{value:{style}.2e}"
    return f"{value:{style}.{4 if size < 10 else 3 if size < 100 else 2 if size < 1000 else 1}f}"


def verdict(found: dict[str, Any], advise: bool = True) -> str:
    """How far the learned law is from the target, where it is far what to try, and a warning where one is due."""
    return " ".join(part for part in (_distance(found, advise), found.get("caution")) if part)


def remarks(found: dict[str, Any]) -> list[str]:
    """What else stands beside final figures: the target law, what the oracle was asked, and what other searches find."""
    said = [f"Target: {found['law']}."] if isinstance(found.get("law"), str) else []
    counts = {"without_score": "without a score", "from_cache": "from a shared file", "retried": "tries repeated"}
    some = [f"{number(found[k])} {words}" for k, words in counts.items() if _positive(found.get(k))]
    if some:
        said.append(f"Oracle: {number(found.get('oracle_calls'))} different objects asked about; {', '.join(some)}.")
    rivals = found.get("beside")
    rivals = rivals if isinstance(rivals, dict) else {}
    if "random" not in rivals and _positive(found.get("random_count")) and found.get("top_asked") is not None:
        said.append(
            f"Beside it, random search with as many oracle calls: mean of the 100 best about {number(found.get('random_top'))}, "
            f"as estimated from {number(found['random_count'])} random objects."
        )
    for name, row in rivals.items():
        if isinstance(row, dict) and isinstance(row.get("sentence"), str):
            said.append(f"Beside it, {name} with as many oracle calls: {row['sentence']}.")
    return said


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _distance(found: dict[str, Any], advise: bool) -> str:
    tv, best, excess = found.get("tv"), found.get("floor_tv"), found.get("excess_tv")
    if tv is None:
        return _by_condition(found) or _by_samples(found, advise)
    words = f"The learned law is {number(tv)} (total variation, 0 to 1) from the target"
    if best is None:
        reason = found.get("floor_reason")
        words += f"; the best achievable is not known ({reason})" if reason else ""
    elif best < REACHED:
        words += ", which can be reached exactly here"
    elif found.get("floor_kind") == "forward-KL":
        words += f"; under this world's noise the best law (of least forward KL) is at {number(best)}"
    else:
        words += f"; under this world's noise no policy can come closer than {number(best)}"
    if best is not None and best >= REACHED and excess is not None:
        words += f", so the excess is {number(excess, '+')}"
    left = tv if excess is None else excess
    return f"{words}." + (_advice(found, tv, best, left) if advise and left > FAR else "")


def _by_condition(found: dict[str, Any]) -> str:
    """Where each condition is listed: the nearest law and the farthest; empty elsewhere."""
    each = sorted(row["tv"] for row in found.get("conditions") or [] if row.get("tv") is not None)
    if not each:
        return ""
    return (
        f"Under each of its {len(each)} conditions the learned law is {number(each[0])} to {number(each[-1])} "
        "(total variation, 0 to 1) from its target."
    )


def _by_samples(found: dict[str, Any], advise: bool) -> str:
    """Where the space is not listed: the gap between log Z and its lower bound."""
    if not found:
        return "Nothing has been measured yet."
    words = "The space is too large to list, so the distance to the target is not known exactly"
    low, high = found.get("elbo"), found.get("log_z_estimate")
    if low is None or high is None:
        return f"{words}."
    gap = high - low
    advice = (
        " It is large: try more --steps, a larger --batch, or another --objective." if advise and gap >= 0.5 else ""
    )
    return (
        f"{words}; the gap between log Z ({number(high)}, estimated) and its lower bound ({number(low)}) is {number(gap)}, "
        f"and 0 would be perfect.{advice} Both are taken from the draws and lie low where good objects are never drawn: "
        "a small gap alone proves nothing."
    )


def _advice(found: dict[str, Any], tv: float, best: float | None, left: float) -> str:
    limit = found.get("limit_tv")
    if limit is not None and tv - limit <= FAR and limit - (best or 0.0) > FAR:
        naive = found.get("objective", "").startswith("naive")
        better = "db or tb" if naive else "flow-kl, which converges to the best forward-KL law"
        return f" That is where this objective converges ({number(limit)}): try --objective {better}."
    tips = ["more --steps (stochflow resume goes on from here)", "a larger --batch"]
    if (found.get("dynamics_bound") or 0.0) > left / 2:
        tips.insert(0, "a better model of the noise (--dynamics tabular, or a larger --dynamics-lr)")
    if found.get("net") == "mlp":
        tips.append("a wider trunk (--hidden 256) or --net lookup")
    return f" That is far; try {', '.join(tips[:-1])} or {tips[-1]}."
