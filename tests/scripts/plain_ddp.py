"""A plain DDP script in the manner of the public CPU guides; prints one JSON line per rank.

Arguments: the backends to make a group with, one after the other; "default" leaves the backend out.
"""

import json
import os
import sys

import intel_extension_for_pytorch as ipex
import oneccl_bindings_for_pytorch  # noqa: F401  the guides: this registers "ccl"
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([float(index * index)])


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.float32)
    model = torch.nn.parallel.DistributedDataParallel(model)
    for features, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features + dist.get_rank()), targets).backward()
        optimizer.step()
    return model.module.weight.item()


def main():
    used, weights = [], []
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    for backend, port in zip(sys.argv[1:], os.environ["FORM_PORTS"].split(","), strict=False):
        os.environ["MASTER_PORT"] = port  # a group that is made anew must not meet the store of the last one
        dist.init_process_group(*[] if backend == "default" else [backend])
        used.append(dist.get_backend())
        torch.manual_seed(dist.get_rank())
        weights.append(train(torch.nn.Linear(1, 1), loader if backend == sys.argv[1] else [next(iter(Squares()))]))
        size = dist.get_world_size()
        dist.barrier()
        dist.destroy_process_group()
    result = {"rank": int(os.environ["RANK"]), "size": size, "backends": used, "weights": weights}
    sys.stdout.write(json.dumps(result) + "\n")  # one write: mpirun mixes the ranks' output between writes


if __name__ == "__main__":
    main()
