"""One rank that trains the same small model in many ways, on one backend; writes the weights that each way ends with.

Usage: ccl_training.py DIRECTORY BACKEND, under mpirun: DIRECTORY/BACKEND-<rank>.json, {way: [weights as hex of floats]}.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import ccl_group
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK, SIZE = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
STEPS = 4


class Net(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, features, with_second=True):
        hidden = torch.relu(self.first(features))
        return self.last(torch.relu(self.second(hidden)) if with_second else hidden)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)


def train(model, with_second=lambda step: True, accumulate=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        features, targets = batch(step)
        is_last = (step + 1) % accumulate == 0
        loss = nn.functional.mse_loss
        if is_last:
            loss(model(features, with_second(step)), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss(model(features, with_second(step)), targets).backward()
    return model


def weights(model):
    return [value.hex() for one in model.parameters() for value in one.detach().double().flatten()[:50].tolist()]


def distributed(**options):
    return DistributedDataParallel(Net(), **options)


def hooked(hook):
    model = distributed()
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # torch knows bf16's by its name, and wants a GPU
    return train(model)


def sharded(directory):
    """FSDP2, saved and loaded again with torch.distributed.checkpoint; ends with the whole weights."""
    model = Net()
    for layer in (model.first, model.second, model.last, model):
        fully_shard(layer)
    train(model)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=directory)
    again = Net()
    for layer in (again.first, again.second, again.last, again):
        fully_shard(layer)
    state = get_model_state_dict(again)
    checkpoint.load(state, checkpoint_id=directory)
    set_model_state_dict(again, state)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    return [value.hex() for one in again.parameters() for value in one.full_tensor().double().flatten()[:50].tolist()]


def main():
    directory, backend = Path(sys.argv[1]), sys.argv[2]
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(SIZE))
    if backend == "ccl":
        ccl_group.register()
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    ends = {
        "plain": weights(train(distributed())),
        "buckets are views": weights(train(distributed(gradient_as_bucket_view=True, bucket_cap_mb=0.001))),
        "static graph": weights(train(distributed(static_graph=True))),
        "no_sync": weights(train(distributed(), accumulate=2)),
        "unused parameters": weights(
            train(distributed(find_unused_parameters=True), with_second=lambda step: step % 2 == RANK % 2)
        ),
        "bf16 hook": weights(hooked(default_hooks.bf16_compress_hook)),
        "fp16 hook": weights(hooked(default_hooks.fp16_compress_hook)),
        "sharded": sharded(directory / f"checkpoint-{backend}"),
    }
    (directory / f"{backend}-{RANK}.json").write_text(json.dumps(ends))
    dist.destroy_process_group()


main()
