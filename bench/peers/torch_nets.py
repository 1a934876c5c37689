"""The networks that Wick's benches time, as a PyTorch user writes them, and the one way both peer benches
report: with --json one object a line {bench, case, value, unit, threads, device, version}."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp_step(device):
    """64-64-64-10, batch 32, fused AdamW; the same batch again and again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x = torch.randn(32, 64, device=device)
    return train_step(net.to(device), x, torch.randint(0, 10, (32,), device=device))


def cnn_step(device, batch=128):
    """The demo's network, 28x28 images, fused AdamW; the same batch again and again, on the device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    x = torch.rand(batch, 1, 28, 28, device=device)
    return train_step(net, x, torch.randint(0, 10, (batch,), device=device))


def train_step(net, x, y):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step():
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    return step


def report(bench, case, value, unit, threads, device, as_json):
    row = {"bench": bench, "case": case, "value": float(f"{value:.5g}"), "unit": unit, "threads": threads,
           "device": device, "version": "torch " + torch.__version__}
    text = f"{bench:<9} {case:<22} {row['value']:>10} {unit:<3} {threads} thread{'s'[:threads > 1]}"
    print(json.dumps(row) if as_json else text, flush=True)
