"""Finding 3: buffers held by small tensors. Pure: rows of `loadtests.pinned` in, the finding out."""

from __future__ import annotations

from loadtests.lab import published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.rows import Row, Rows, cell, devices, groups, listed, middle, taken, values

BOUND = 1.1
THEIRS = "mlx-lm"  # moments of mlx-lm's own loop begin with it


def pins(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    finding = Finding(
        "3. Buffers held by small tensors",
        "Do long-lived cache arrays hold buffers that are much larger than they are?",
        published.PINS.text,
        _verdict(rows),
        short=published.PINS.short,
        means=_means(rows),
    )
    finding.answer = [
        f"Measured on {listed(devices(rows))} with `mx.get_array_buffer_size`, one process a model; bytes are "
        "counted, so that a second run says the same. Two causes must be kept apart. MLX's pool hands out a free "
        "buffer only below the lesser of twice the request and the request plus two pages (`reuse_from_cache` in its "
        "`buffer_cache.h`): the published cause can't occur. But a view keeps the whole buffer behind it: what "
        "mlx-lm's BatchGenerator hands over when a row ends are views of the whole batch's arrays, and their ratio "
        "is what the last column says.",
        _states(rows),
    ]
    finding.tables = [_table(rows)]
    finding.unproven = (
        "The pool of Metal rounds to larger pages than that of Linux; its ratios for tiny arrays may be higher. The "
        "pool's bound was read in the code, and no run tried to break it."
    )
    return finding


def _split(rows: Rows) -> tuple[list[Row], list[Row]]:
    """Marathon's moments that have arrays, and mlx-lm's."""
    ours = [row for row in rows if not row["moment"].startswith(THEIRS) and row["arrays"] != 0]
    return ours, [row for row in rows if row["moment"].startswith(THEIRS)]


def _verdict(rows: Rows) -> Judgement:
    ours, theirs = _split(rows)
    views = max(theirs, key=lambda row: row["ratio"], default=None)
    said = [] if not ours else [_most(ours)]
    if views is not None:
        said.append(
            f"caches that mlx-lm hands over at a row's end hold up to {_worst(views)}, by views and not the pool"
        )
    sure = "Sure of the bytes, which are exact counts" + f" in {len(groups(rows, 'shape'))} tiny models, one run each"
    pinned = [row["ratio"] for row in ours + theirs]
    word = "Can't tell" if not pinned else "Not reproduced in Marathon"
    if ours and max(row["ratio"] for row in ours) > BOUND:
        word = "Bound missed"
    if views is not None and views["ratio"] > BOUND and word.startswith("Not"):
        word += "; in mlx-lm by another cause"
    words = "; ".join(said) + "."
    return Judgement(word, words[:1].upper() + words[1:], sure + "; real sizes and Metal's pages weren't measured.")


def _means(rows: Rows) -> str:
    ours, theirs = _split(rows)
    words = "MLX's pool gives no array a buffer of twice its size or more, so that the published waste can't occur."
    if theirs:
        views = max(theirs, key=lambda row: row["ratio"])
        words += " A view can: the caches of a row that mlx-lm takes out of a batch hold up to "
        words += f"{views['ratio']:.3f} times their bytes ({views['shape']})."
    if ours:
        most = max(row["ratio"] for row in ours)
        words += f" Marathon copies them, and its caches hold at most {most:.3f} times their bytes."
    return words


def _most(ours: Rows) -> str:
    worst = max(ours, key=lambda row: row["ratio"])
    over = sum(row["ratio"] > BOUND for row in ours)
    return (
        f"in Marathon long-lived cache arrays hold at most {_worst(worst)}; {over} of {len(ours)} moments are above "
        f"the bound of {BOUND}"
    )


def _worst(row: Row) -> str:
    return f"{row['ratio']:.3f} times their bytes ({row['shape']}, {row['moment']})"


def _states(rows: Rows) -> str:
    words = (
        "In a batch (decode, join, leave) the bound is for arrays that outlive a step; recurrent states are made anew "
        "by each step and are left out of it"
    )
    found = [row for row in rows if row["with_states"] != ""]
    if not values(found, "with_states"):
        return words + "."
    worst = max(found, key=lambda row: row["with_states"])
    return f"{words}. With them the most is {worst['with_states']:.2f} ({worst['shape']}, {worst['moment']})."


def _table(rows: Rows) -> Table:
    moments = [name for (name,) in groups(rows, "moment")]
    cells = groups(rows, "shape", "moment")
    body = []
    for (shape,), own in groups(rows, "shape").items():
        found = [_ratio(cells.get((shape, name), [])) for name in moments]
        body.append([shape, *found, listed(devices(own)), taken(own)])
    return Table(
        "Bytes held ÷ bytes owned. –: no array outlives a step there", [["model", *moments, "device", "taken"], *body]
    )


def _ratio(rows: Rows) -> str:
    if not middle(rows, "arrays"):
        return "–"
    found = middle(rows, "ratio")
    return f"{found:.3f}" if found == found else cell(found)
