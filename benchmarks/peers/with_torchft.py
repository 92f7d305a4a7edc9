"""The same loop with torchft, whose replica groups continue without one that is lost.

usage: TORCHFT_LIGHTHOUSE=http://HOST:PORT python with_torchft.py FOLDER GROUP NUM_GROUPS, once for each group, with the
repository in PYTHONPATH. Each group is one process. It writes a line for each step to FOLDER/metrics-GROUP.jsonl. The
samples of a lost group are left out, and its last step is not applied.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from with_checkpoints import BATCH_SIZE, LR, MOMENTUM, digits

from models.convnet import ConvNet


def main(folder: Path, group: int, num_groups: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ConvNet([1, 28, 28], 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"group_{group}",
    )
    parallel, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    data = digits()
    sampler = DistributedSampler(data, group, num_groups, group_rank=0, num_replicas=1, drop_last=True)
    loader = DataLoader(data, BATCH_SIZE // num_groups, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            managed.zero_grad()
            loss = F.cross_entropy(parallel(inputs), targets)
            loss.backward()
            managed.step()
            with (folder / f"metrics-{group}.jsonl").open("a") as file:
                file.write(json.dumps({"step": manager.current_step(), "loss": loss.item()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
