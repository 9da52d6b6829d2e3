"""A plain DDP script with checkpoints of its own: goes on from the one that CLUSTER_TRAIN_RESUME names.

Arguments: steps in all, steps between checkpoints. DIE_AT, WIPE, CUT: see resumable_trainer.py.
"""

import hashlib
import os
import pathlib
import shutil
import signal
import sys

import torch
import torch.distributed as dist

STEPS, SAVE_STEPS = int(sys.argv[1]), int(sys.argv[2])


def main():
    dist.init_process_group()
    rank, attempt = dist.get_rank(), int(os.environ["CLUSTER_TRAIN_ATTEMPT"])
    fates = [entry for entry in os.environ.get("DIE_AT", "").split(",") if entry]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    first = 0
    if "CLUSTER_TRAIN_RESUME" in os.environ:
        state = torch.load(os.environ["CLUSTER_TRAIN_RESUME"])
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, STEPS):
        print("step", step, flush=True)
        if len(fates) >= attempt and fates[attempt - 1] == f"{rank}:{step}":
            if "WIPE" in os.environ:
                shutil.rmtree(pathlib.Path.cwd())
            if "CUT" in os.environ:
                os.truncate(os.environ["CUT"], pathlib.Path(os.environ["CUT"]).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if rank == 0 and (step + 1) % SAVE_STEPS == 0:
            pathlib.Path("states").mkdir(exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, f"states/step-{step + 1}.pt")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("weights", digest.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
