"""The networks that Wick's benches time, as a PyTorch user writes them, and the one way both peer benches
report: with --json one object a line {bench, case, value, unit, threads, device, version}."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp_step(device, how="eager"):
    """64-64-64-10, batch 32, fused AdamW; the same batch again and again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x = torch.randn(32, 64, device=device)
    return train_step(net.to(device), x, torch.randint(0, 10, (32,), device=device), how)


def cnn_step(device, batch=128, how="eager"):
    """The demo's network, 28x28 images, fused AdamW; the same batch again and again, on the device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    x = torch.rand(batch, 1, 28, 28, device=device)
    return train_step(net, x, torch.randint(0, 10, (batch,), device=device), how)


def train_step(net, x, y, how="eager"):
    """how: eager; compile (torch.compile with reduce-overhead, so forward and backward are CUDA graphs); or graph
    (torch.compile, and the whole step captured by hand as one CUDA graph)."""
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True, capturable=how == "graph")

    def loss():
        return F.cross_entropy(net(x), y)
    if how != "eager":
        loss = torch.compile(loss, mode="reduce-overhead" if how == "compile" else None)

    def step():
        loss().backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    return captured(step) if how == "graph" else step


def captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def report(bench, case, value, unit, threads, device, as_json, how="eager"):
    row = {"bench": bench, "case": case, "value": float(f"{value:.5g}"), "unit": unit, "threads": threads,
           "device": device, "version": "torch " + torch.__version__ + ("" if how == "eager" else " " + how)}
    text = f"{bench:<9} {case:<22} {row['value']:>10} {unit:<3} {threads} thread{'s'[:threads > 1]}"
    print(json.dumps(row) if as_json else text, flush=True)
