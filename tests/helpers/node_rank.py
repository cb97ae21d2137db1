"""One process of a model that several nodes share; `torchrun` starts it.

    node_rank.py FOLDER OUTPUT TP PP

It loads FOLDER, runs it on `tokens()`, and writes what it found to OUTPUT/<rank>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def tokens() -> Tensor:
    return torch.randint(3, 131, (2, 7), generator=torch.Generator().manual_seed(1))


def main(folder: str, output: str, tp: int, pp: int) -> None:
    from quantload import api
    from quantload.runtime.parallel import Parallel

    torch.set_num_threads(1)
    parallel = Parallel.from_environment(tp, pp, device="cpu")
    model = api.load(folder, parallel=parallel, quantize_inputs=False)
    with torch.no_grad():
        found = {
            "logits": model(tokens()).logits,
            "text": model.generate(tokens()[:1], **GREEDY),
            "node": int(os.environ["GROUP_RANK"]),
            "place": (parallel.pp_rank, parallel.tp_rank),
            "bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        }
    torch.save(found, Path(output) / f"{parallel.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
