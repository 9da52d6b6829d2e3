"""A Trainer script that knows nothing of restarts: a tiny BERT without dropout; every rank prints its weights at the end.

DIE_AT in the environment, "rank:step[,rank:step...]", kills that rank with SIGKILL before that step: the first one in the
first attempt, the second one in the second. Before that, WIPE takes the rank's working directory away, and CUT, the name of
a file, leaves half of it. SLEEP_AT, "step", makes every rank of the first attempt wait there.
"""

import hashlib
import os
import pathlib
import shutil
import signal
import time

import torch
from transformers import BertConfig, BertForQuestionAnswering, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


class Fate(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        attempt = int(os.environ.get("CLUSTER_TRAIN_ATTEMPT", "1"))
        fates = [entry for entry in os.environ.get("DIE_AT", "").split(",") if entry]
        print(
            "step", state.global_step, "of", args.world_size, "ranks, accumulation", args.gradient_accumulation_steps, flush=True
        )
        if len(fates) >= attempt and fates[attempt - 1] == f"{args.process_index}:{state.global_step}":
            if "WIPE" in os.environ:
                shutil.rmtree(pathlib.Path.cwd())
            if "CUT" in os.environ:
                os.truncate(os.environ["CUT"], pathlib.Path(os.environ["CUT"]).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1 and os.environ.get("SLEEP_AT") == str(state.global_step):
            time.sleep(600)


def main():
    args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [
        {
            "input_ids": torch.randint(50, (8,), generator=generator),
            "start_positions": torch.tensor(i % 8),
            "end_positions": torch.tensor(7),
        }
        for i in range(40)
    ]
    config = BertConfig(vocab_size=50, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZE)
    model = BertForQuestionAnswering(config)
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Fate()])
    trainer.train()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("weights", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
