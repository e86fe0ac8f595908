"""Your own task: `bin/fsl-node --role client --task examples/own_task.py:train ADDRESS`.

Each client uses its own part of a synthetic data set; together the clients fit one small network to
all of it.
"""

import torch
from torch import nn


def train(fed):
    """Fit y = sin(3 x) until the run ends."""
    torch.manual_seed(fed.seed)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(fed.device)
    fed.attach(model)
    optimizer = fed.optimizer(model, optimizer="adamw", learning_rate=3e-3)
    scheduler = fed.scheduler(optimizer)  # rates follow the run's progress
    points = torch.linspace(-2, 2, 4096).unsqueeze(1)
    batches = list(points[torch.randperm(len(points))].split(64))
    for x in fed.shard(batches):
        loss = nn.functional.mse_loss(model(x.to(fed.device)), torch.sin(3 * x).to(fed.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not fed.step(tokens=len(x), metrics={"loss": loss.item()}):
            break
