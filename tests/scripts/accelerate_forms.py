"""Accelerate scripts without any CPU flag; prints one JSON line per rank.

Arguments: the forms to try, one after the other.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

FORMS = {
    "accelerator": lambda: Accelerator(),
    "accelerator ccl": lambda: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="ccl")]),
    "accelerator timeout": lambda: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))]),
    "accelerator bf16": lambda: Accelerator(mixed_precision="bf16"),
    "state": lambda: PartialState(),
    "group first": lambda: (dist.init_process_group(), Accelerator())[1],
}


def train(accelerator):
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    return accelerator.unwrap_model(model).weight.item()


def main():
    results = []
    for form, port in zip(sys.argv[1:], os.environ["FORM_PORTS"].split(","), strict=False):
        os.environ["MASTER_PORT"] = port  # a group that is made anew must not meet the store of the last one
        state = FORMS[form]()
        results.append(
            {
                "form": form,
                "size": state.num_processes,
                "rank": state.process_index,
                "type": state.distributed_type.value,
                "device": state.device.type,
                "backend": dist.get_backend(),
                "timeout_s": dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
                // timedelta(seconds=1),
                "weight": train(state) if isinstance(state, Accelerator) else 0.0,
            }
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.write(json.dumps(results) + "\n")  # one write: mpirun mixes the ranks' output between writes


if __name__ == "__main__":
    main()
