"""Your own script that joins a run: `python examples/own_script.py HOST:PORT`.

Only the lines marked + are needed for that.
"""

import sys

import torch
from torch import nn

import fsl_async


def main(server: str) -> None:
    """Fit y = sin(3 x), together with the other clients of the run."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = 0
    with fsl_async.join(server) as fed:  # +
        fed.attach(model)  # +
        scheduler = fed.scheduler(optimizer)  # + rates follow the run's progress
        while True:
            x = 4 * torch.rand(64, 1) - 2
            loss = nn.functional.mse_loss(model(x), torch.sin(3 * x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()  # +
            steps += 1
            if not fed.step(tokens=len(x), metrics={"loss": loss.item()}):  # +
                break
    print(f"{steps:,} steps, last loss {loss.item():.4f}")


if __name__ == "__main__":
    # One line for errors, an orderly end at Ctrl-C, and the exit codes of README.md.
    with fsl_async.clean_exit():
        if len(sys.argv) != 2:
            raise fsl_async.FslError(f"which server? python {sys.argv[0]} HOST:PORT")
        main(sys.argv[1])
