"""One rank of a job that ends in the way that the first argument names; the tests look at what it says and returns."""

import os
import signal
import sys
import time
from datetime import timedelta

import ccl_group
import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
LIMIT = timedelta(seconds=float(os.environ.get("LIMIT_S", "60")))


def some_collectives(count=20, group=None):
    for _ in range(count):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(dist.get_world_size(group)).all()


def ends():
    some_collectives()
    dist.destroy_process_group()
    print(f"destroyed {dist.is_initialized()}")


def ends_without_destroying():
    some_collectives()
    if RANK == 1:
        time.sleep(3)  # the others must not be ended meanwhile, nor hang


def begins_again():
    for port in os.environ["FORM_PORTS"].split(","):
        os.environ["MASTER_PORT"] = port
        some_collectives()
        dist.destroy_process_group()
        dist.init_process_group("ccl", timeout=LIMIT)
    some_collectives()
    print("began again")


def leaves_work_behind():
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(50)]
    print(f"left {len(works)}")


def outlives_the_limit():
    some_collectives()
    time.sleep(LIMIT.total_seconds() + 2)  # as a training outlives the limit of one of its collectives
    some_collectives()
    got = torch.zeros(1)
    works = [dist.isend(torch.ones(1), (RANK + 1) % SIZE), dist.irecv(got, (RANK - 1) % SIZE)]
    print(f"sent after the limit {all(work.wait() for work in works) and got.item()}")


def raises():
    some_collectives()
    if RANK == 1:
        raise ValueError("rank 1 is broken")
    some_collectives()


def exits_with_3():
    some_collectives()
    if RANK == 1:
        sys.exit(3)
    some_collectives()


def is_killed():
    some_collectives()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    some_collectives()


def never_arrives():
    some_collectives(3)
    if RANK == 1:
        time.sleep(300)
    dist.broadcast(torch.ones(10), 0) if RANK == 2 else dist.all_reduce(torch.ones(10))


def never_arrives_for_a_future():
    if RANK == 1:
        time.sleep(300)
    dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()


def waits_with_a_limit():
    if RANK == 1:
        time.sleep(4)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    try:
        print("in time", work.wait(timedelta(seconds=1)))
    except RuntimeError as error:
        print("too late:", error)
    work.wait()
    some_collectives()


def disagrees_on_the_shape():
    some_collectives(2)
    dist.all_reduce(torch.ones(3 + RANK))


def disagrees_on_the_operation():
    some_collectives(2)
    dist.all_reduce(torch.ones(4)) if RANK else dist.broadcast(torch.ones(4), 0)


def has_overlapping_groups():
    groups = {members: dist.new_group(members) for members in [(0, 1), (1, 2), (0, 2), (0, 1, 2), (1,)]}
    for _ in range(3):
        for members, group in groups.items():
            if RANK in members:
                tensor = torch.tensor([float(RANK)])
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == sum(members)
                outputs = [torch.zeros(1) for _ in members]
                dist.all_gather(outputs, torch.tensor([float(RANK)]), group=group)
                assert [int(one) for one in outputs] == list(members)
                dist.barrier(group)
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(SIZE)]
    told = [{"from": RANK}]
    dist.broadcast_object_list(told, 2)
    assert told == [{"from": 2}]
    got = [None] * SIZE if RANK == 1 else None
    dist.gather_object(RANK, got, 1)
    assert got is None or got == list(range(SIZE))
    mine = [None]
    dist.scatter_object_list(mine, ["a", "b", "c"] if RANK == 0 else None, 0)
    assert mine == ["abc"[RANK]]
    dist.destroy_process_group(groups[(0, 1)]) if RANK < 2 else None
    some_collectives()
    print("overlapped")


def main():
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(SIZE))
    ccl_group.register()
    dist.init_process_group("ccl", timeout=LIMIT)
    globals()[sys.argv[1]]()


main()
