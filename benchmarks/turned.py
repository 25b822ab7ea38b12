"""How fast rows become columns (`penstock.model.turned`), by tile: the share of a plain copy's bytes a second.

    python benchmarks/turned.py

Shapes are those of llama-8b with 4 x 4096 tokens. The last line has the tile that takes the least time for all of them.
"""

import torch

from penstock.model.turned_kernel import TILE, launch_turn

SHAPES = ((16384, 4096), (16384, 14336), (4096, 14336))
_SIZES = (
    (64, 64, 4),
    (64, 128, 4),
    (128, 64, 4),
    (128, 128, 4),
    (128, 128, 8),
    (128, 256, 8),
    (256, 64, 8),
    (256, 128, 8),
)
TILES = [dict(zip(TILE, sizes, strict=True)) for sizes in _SIZES]


def seconds(work, repeats=20):
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def kinds(shape):
    """(what it is, bytes that are read and written, how it is called with a tile)."""
    wide, rate = torch.randn(shape, device="cuda", dtype=torch.bfloat16), torch.tensor(50.0, device="cuda")
    narrow = wide.to(torch.float8_e4m3fn)
    columns = torch.empty(shape[::-1], device="cuda", dtype=torch.float8_e4m3fn)
    yield "turned", 2, lambda tile: launch_turn(narrow, columns, tile=tile)
    yield "cast columns", 3, lambda tile: launch_turn(wide, columns, rate, tile)


def main():
    total = dict.fromkeys(range(len(TILES)), 0.0)
    print(f"tiles as {[*TILE]}; now {[*TILE.values()]}")
    for shape in SHAPES:
        source = torch.empty(2 * shape[0] * shape[1], dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copied = 2 * source.numel() / seconds(lambda a=source, b=target: b.copy_(a))
        print(f"{shape[0]} x {shape[1]}: a copy moves {copied / 1e12:.2f} TB/s")
        for name, moved, call in kinds(shape):
            found = [seconds(lambda call=call, tile=tile: call(tile)) for tile in TILES]
            for n, took in enumerate(found):
                total[n] += took
            share = [moved * shape[0] * shape[1] / took / copied for took in found]
            print(f"  {name:12}", *(f"{s:.2f}" for s in share), flush=True)
    print("  tiles       ", *("x".join(map(str, tile.values())) for tile in TILES))
    best = min(total, key=total.__getitem__)
    now = total[TILES.index(TILE)]
    print(f"now {now * 1e3:.3f} ms for all, best {total[best] * 1e3:.3f} ms:")
    print(*TILES[best].values())


if __name__ == "__main__":
    main()
