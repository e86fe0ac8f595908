"""A Hugging Face Llama under FSDP2 with mixed precision, as one client of a run.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_llama.py fsl://ps.example.org:7100?key=...

Without an address it trains alone. The model is made from a configuration; `--hidden` and
`--layers` choose its size. Weights are kept and exchanged in fp32, and computed with in bf16. All
ranks together are one client: fsl-async reads and writes each rank's shards where they are, and
nothing is gathered.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fsl_async

VOCABULARY = 256  # bytes


def build(arguments, device):
    """The sharded model: each decoder layer is gathered for its own forward and backward."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 64),
        max_position_embeddings=arguments.context,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


def batches(arguments, seed, device):
    """Random windows of a text, here this file."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(
            len(text) - arguments.context - 1, (arguments.batch,), generator=chance
        )
        windows = [text[start : start + arguments.context + 1] for start in starts]
        yield torch.stack(windows).to(device)


def train(model, fed, arguments, device):
    """Train until the run ends, or for `--steps` without one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss = torch.zeros(())
    # Other windows in each rank of each client, and others again after a restart.
    seed = hash((dist.get_rank(), 0) if fed is None else (*fed.part, fed.version))
    for step, batch in enumerate(batches(arguments, seed, device)):
        logits = model(input_ids=batch[:, :-1]).logits
        logits = logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens = batch[:, 1:].numel()  # of this rank: its node adds them up
        if fed is not None and not fed.step(tokens=tokens, metrics={"loss": loss.item()}):
            break
        if fed is None and step + 1 >= arguments.steps:
            break
    return loss.item()


def main():
    """Read the arguments, join the run, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", nargs="?", help="address of the parameter server")
    parser.add_argument("--name", help="this client's name in the run")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="without a server")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    model = build(arguments, device)
    if arguments.server:
        with fsl_async.join(arguments.server, name=arguments.name) as fed:
            fed.attach(model)
            loss = train(model, fed, arguments, device)
    else:
        loss = train(model, None, arguments, device)
    if dist.get_rank() == 0:
        print(f"last loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with fsl_async.clean_exit():
        main()
