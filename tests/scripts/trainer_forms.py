"""Trainer scripts of several forms on a tiny random BERT; prints one JSON line per rank.

Arguments: the forms to try, one after the other, each in JSON: an object (keywords of TrainingArguments) or a list (a
command line).
"""

import json
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForQuestionAnswering, HfArgumentParser, Trainer, TrainingArguments

DATA = [
    {"input_ids": torch.tensor([i, 2, 3]), "start_positions": torch.tensor(i % 3), "end_positions": torch.tensor(2)}
    for i in range(4)
]


def arguments(form):
    common = {"output_dir": tempfile.mkdtemp(), "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    if isinstance(form, dict):
        return TrainingArguments(report_to=[], **common, **form)
    words = [word for name, value in common.items() for word in (f"--{name}", str(value))]
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*words, "--report_to", "none", *form])[0]


def train(args):
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForQuestionAnswering(BertConfig(vocab_size=50, max_position_embeddings=16, **size))
    trainer = Trainer(model=model, args=args, train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    return {
        "eval_loss": trainer.evaluate()["eval_loss"],
        "checksum": sum(parameter.double().sum().item() for parameter in model.parameters()),
    }


def main():
    results = []
    for form, port in zip(map(json.loads, sys.argv[1:]), os.environ["FORM_PORTS"].split(","), strict=False):
        os.environ["MASTER_PORT"] = port  # a group that is made anew must not meet the store of the last one
        args = arguments(form)
        group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        results.append(
            {
                "form": form,
                "size": args.world_size,
                "rank": args.process_index,
                "mode": args.parallel_mode.value,
                "backend": dist.get_backend(),
                "timeout_s": group.options._timeout // timedelta(seconds=1),
                **train(args),
            }
        )
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.write(json.dumps(results) + "\n")  # one write: mpirun mixes the ranks' output between writes


if __name__ == "__main__":
    main()
