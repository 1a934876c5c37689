#!/usr/bin/env python3
"""PyTorch's figures on the first CUDA device, eager or (--how) compiled: a training step of the demo's network at batch 128 and
of the tiny MLP. Three figures for each, over 200 steps after 20 of warm-up: `_event`, the median time between
CUDA events around one step; `_host`, the median of one step and a synchronize by the host's clock; `_stream`,
the mean of a run of steps with no synchronize between them, what a loop that reads no loss pays. cuDNN picks
its algorithms by measuring; TF32 is as PyTorch has it by default (convolutions yes, matmul no).

    python bench/peers/torch_cuda.py [--json] [--no-tf32] [--how eager|compile|graph]
"""
import argparse
import statistics
import sys
import time

import torch

from torch_nets import cnn_step, mlp_step, report

WARM_UP, STEPS = 20, 200


def times(step):
    """Microseconds: (event, host, stream)."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    event, host = [], []
    for _ in range(STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        t = time.perf_counter()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        host.append((time.perf_counter() - t) * 1e6)
        event.append(begin.elapsed_time(end) * 1e3)
    t = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return statistics.median(event), statistics.median(host), (time.perf_counter() - t) / STEPS * 1e6


def main():
    ap = argparse.ArgumentParser(description="PyTorch CUDA figures.")
    ap.add_argument("--json", action="store_true")
    ap.add_argument("--no-tf32", action="store_true", help="full f32 in convolutions too")
    ap.add_argument("--how", choices=["eager", "compile", "graph"], default="eager",
                    help="see train_step in torch_nets.py")
    args = ap.parse_args()
    if not torch.cuda.is_available():
        print("torch_cuda: PyTorch finds no CUDA device", file=sys.stderr)
        return 1
    torch.backends.cudnn.allow_tf32 = not args.no_tf32
    torch.backends.cudnn.benchmark = True
    device = torch.cuda.get_device_name(0)
    for bench, case, make in (("train", "cnn_step_b128", cnn_step), ("train", "mlp_step", mlp_step)):
        for kind, us in zip(("event", "host", "stream"), times(make("cuda", how=args.how))):
            report(bench, f"{case}_{kind}", us, "us", 1, device, args.json, args.how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
