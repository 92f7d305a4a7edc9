"""The baseline of recovery: the usual hand-written loop, which resumes from its own checkpoints.

usage: torchrun --standalone --nproc-per-node N --max-restarts 3 with_checkpoints.py FOLDER, with the repository in
PYTHONPATH. Writes a checkpoint every 10 steps, and a line for each step to FOLDER/metrics.jsonl.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from data.digits import Digits
from models.convnet import ConvNet

BATCH_SIZE, EVERY_STEPS, LR, MOMENTUM = 64, 10, 0.05, 0.9


def digits() -> TensorDataset:
    data = Digits(train=True, sample_shape=[1, 28, 28], num_outputs=10)
    return TensorDataset(data.samples, data.targets)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet([1, 28, 28], 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    data = digits()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for epoch in itertools.count(step // len(loader)):
        sampler.set_epoch(epoch)
        for inputs, targets in itertools.islice(loader, step - epoch * len(loader), None):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
                if step % EVERY_STEPS == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, folder / "partial.pt")
                    os.replace(folder / "partial.pt", checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
