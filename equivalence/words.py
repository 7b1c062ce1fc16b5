"""Names, shares and percentages as a line says them."""


def made_of(weights: list[float], shares: list[int]) -> str:
    parts = [f"{weight:.3g} x share {c}" for c, weight in zip(shares, weights, strict=True)]
    return " + ".join(parts)


def percent(weights: list[float]) -> str:
    total = sum(weights)
    return " and ".join(f"{100 * weight / total:.1f} %" for weight in weights)


def some_of(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
