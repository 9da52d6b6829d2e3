"""One rank of tests/bench/ccl.py: times collectives or a training step on one backend; rank 0 prints one JSON line.

Usage: ccl_rank.py BACKEND both|start, under mpirun, run by bootstrap.py. Each rank has one core.
"""

import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SIZES = (8, 64 << 10, 1 << 20, 25 << 20, 100 << 20)  # bytes
BUDGET_S = 0.4  # for one size


def all_reduce():
    """{size in bytes: milliseconds, the median}"""
    found = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        for _ in range(3):
            dist.all_reduce(tensor)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        count = torch.tensor(max(5, min(300, int(BUDGET_S / (time.perf_counter() - started)))))
        dist.broadcast(count, 0)
        times = []
        for _ in range(int(count)):
            started = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - started)
        found[size] = 1000 * statistics.median(times)
    return found


def step():
    """{"step": milliseconds, the median of 12} of a BERT with 11 million parameters"""
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model = torch.nn.parallel.DistributedDataParallel(BertForQuestionAnswering(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, config.vocab_size, (2, 64))
    times = []
    for _ in range(15):
        started = time.perf_counter()
        model(input_ids=words, start_positions=torch.zeros(2).long(), end_positions=torch.ones(2).long()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return {"step": 1000 * statistics.median(times[3:])}


def both():
    """The collectives, then the step."""
    return {**all_reduce(), **step()}


def start():
    """20 collectives between a start and an end."""
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    return {}


def main():
    own = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own[int(os.environ["PMI_RANK"]) % len(own)]})  # the nodes may be containers of one machine
    os.environ.pop("CCL_WORKER_AFFINITY", None)  # the worker: on the same core
    os.environ.update(RANK=os.environ["PMI_RANK"], WORLD_SIZE=os.environ["PMI_SIZE"])
    if importlib.util.find_spec("ccl_group"):
        importlib.import_module("ccl_group").register()
    dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=300))
    found = globals()[sys.argv[2]]()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


main()
