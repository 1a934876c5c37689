#!/usr/bin/env python3
"""PyTorch's figures on this machine's CPU, eager, with 1 and 2 threads: the least of several repeats, because
other work on the machine only ever adds time.

    python bench/peers/torch_cpu.py [--json] [--repeats N]
"""
import argparse
import time

import torch

from torch_nets import cnn_step, mlp_step, report


def cpu_name():
    with open("/proc/cpuinfo") as f:
        names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    return names[0] if names else "cpu"


def least(fn, calls, repeats):
    """Seconds a call: the least of `repeats` means over `calls` calls each."""
    for _ in range(max(3, calls // 10)):
        fn()
    best = float("inf")
    for _ in range(repeats):
        t = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, (time.perf_counter() - t) / calls)
    return best


def main():
    ap = argparse.ArgumentParser(description="PyTorch CPU figures.")
    ap.add_argument("--json", action="store_true")
    ap.add_argument("--repeats", type=int, default=15)
    args = ap.parse_args()
    device = cpu_name()
    a, b, w = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for threads in (1, 2):
        torch.set_num_threads(threads)

        def row(bench, case, fn, calls, unit, scale):
            report(bench, case, least(fn, calls, args.repeats) * scale, unit, threads, device, args.json)
        row("overhead", "add_4x4", lambda: a + b, 20000, "ns", 1e9)
        row("overhead", "add_4x4_grad", lambda: w + b, 20000, "ns", 1e9)
        row("overhead", "mlp_step", mlp_step("cpu"), 500, "us", 1e6)
        row("train", "cnn_step_b128", cnn_step("cpu"), 8, "ms", 1e3)


if __name__ == "__main__":
    main()
