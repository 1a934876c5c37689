#!/usr/bin/env python3
"""Writes the golden vectors of tests/golden from PyTorch on the CPU, in one thread and f32.

Three models' first 20 training losses, and single ops whose edge behaviour a reference of our own could get
wrong in the same way. Every loss curve is also computed in float64 by a second implementation; the two share
the initial parameters, the batches and PyTorch's backward engine only. Their distance bounds the f32 noise
and is printed.

    python tools/golden.py                write tests/golden/*.bin
    python tools/golden.py --check        compute again and compare with the files that are there
    python tools/golden.py --out DIR      write elsewhere

Needs the peers of tools/peers.sh and the Debian package dataset-fashion-mnist. The file format stands in
tests/golden/README.md.
"""
import argparse
import gzip
import math
import os
import struct
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 20
BATCH = 32
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
FASHION = "/usr/share/datasets/fashion-mnist"
DTYPES = [np.dtype("<f4"), np.dtype("<i8"), np.dtype("u1"), np.dtype("<f8")]  # the index is the file's code


# ---- the file format ---------------------------------------------------------------------------------------

def write_file(path, tensors):
    with open(path, "wb") as f:
        f.write(b"WKG1" + struct.pack("<I", len(tensors)))
        for name, value in tensors.items():
            a = to_array(value)
            raw = name.encode("ascii")
            f.write(struct.pack("<I", len(raw)) + raw)
            f.write(struct.pack("<II", DTYPES.index(a.dtype), a.ndim))
            f.write(struct.pack(f"<{a.ndim}q", *a.shape))
            f.write(a.tobytes(order="C"))


def to_array(value):
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy()
    return np.asarray(value)  # a Python float becomes a 0-d f64, an int a 0-d i64


def read_file(path):
    with open(path, "rb") as f:
        buf = f.read()
    magic, count = struct.unpack_from("<4sI", buf, 0)
    assert magic == b"WKG1", path
    at, tensors = 8, {}
    for _ in range(count):
        (n,) = struct.unpack_from("<I", buf, at)
        name = buf[at + 4:at + 4 + n].decode("ascii")
        at += 4 + n
        code, ndim = struct.unpack_from("<II", buf, at)
        dims = struct.unpack_from(f"<{ndim}q", buf, at + 8)
        at += 8 + 8 * ndim
        numel = math.prod(dims)
        tensors[name] = np.frombuffer(buf, DTYPES[code], numel, at).reshape(dims)
        at += numel * DTYPES[code].itemsize
    assert at == len(buf), path
    return tensors


# ---- models, as a PyTorch user writes them -----------------------------------------------------------------

class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):  # u8 (N, 1, 28, 28)
        x = x.float() / 255
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln2 = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.ln1(x)).split(d, dim=2)
        q, k, v = (u.view(b, t, self.heads, -1).transpose(1, 2) for u in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, vocab=64, length=32, d=64, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(length, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        with torch.no_grad():  # no parameter starts where a mistake in its use could not show
            self.tok.weight.normal_(0, 0.1)
            self.pos.weight.normal_(0, 0.1)
            for m in self.modules():
                if isinstance(m, nn.LayerNorm):
                    m.weight.normal_(1, 0.1)
                    m.bias.normal_(0, 0.1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.tok.weight).flatten(0, 1)


# ---- the same models a second time, in float64 and from formulas -------------------------------------------

def conv3x3_64(x, w, b):
    n, _, h, wd = x.shape
    return (w.flatten(1) @ F.unfold(x, 3, padding=1)).view(n, -1, h, wd) + b.view(-1, 1, 1)


def pool2_64(x):
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).transpose(3, 4).reshape(n, c, h // 2, w // 2, 4).max(-1).values


def norm64(x, w, b):
    x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * w + b


def cnn64(p, x):
    x = x.double() / 255
    x = pool2_64(conv3x3_64(x, p["conv1.weight"], p["conv1.bias"]).clamp(min=0))
    x = pool2_64(conv3x3_64(x, p["conv2.weight"], p["conv2.bias"]).clamp(min=0))
    x = (x.flatten(1) @ p["fc1.weight"].T + p["fc1.bias"]).clamp(min=0)
    return x @ p["fc2.weight"].T + p["fc2.bias"]


def mlp64(p, x):
    x = x.double()
    for layer in ("fc1", "fc2"):
        x = (x @ p[layer + ".weight"].T + p[layer + ".bias"]).clamp(min=0)
    return x @ p["fc3.weight"].T + p["fc3.bias"]


def transformer64(p, ids):
    b, t = ids.shape
    d, heads = p["tok.weight"].shape[1], 4
    hd = d // heads
    x = p["tok.weight"][ids] + p["pos.weight"][:t]
    future = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
    for layer in range(2):
        w = {k.split(".", 2)[2]: v for k, v in p.items() if k.startswith(f"blocks.{layer}.")}
        qkv = norm64(x, w["ln1.weight"], w["ln1.bias"]) @ w["qkv.weight"].T + w["qkv.bias"]
        q, k, v = qkv.view(b, t, 3, heads, hd).permute(2, 0, 3, 1, 4)
        s = (torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(hd)).masked_fill(future, -math.inf)
        e = (s - s.amax(-1, keepdim=True)).exp()
        y = torch.einsum("bhij,bhjd->bihd", e / e.sum(-1, keepdim=True), v).reshape(b, t, d)
        x = x + y @ w["proj.weight"].T + w["proj.bias"]
        u = norm64(x, w["ln2.weight"], w["ln2.bias"]) @ w["fc1.weight"].T + w["fc1.bias"]
        u = 0.5 * u * (1 + (math.sqrt(2 / math.pi) * (u + 0.044715 * u ** 3)).tanh())
        x = x + u @ w["fc2.weight"].T + w["fc2.bias"]
    return (norm64(x, p["ln_f.weight"], p["ln_f.bias"]) @ p["tok.weight"].T).flatten(0, 1)


def losses64(forward, params, xs, ys):
    p = {k: v.double().requires_grad_() for k, v in params.items()}
    m = {k: torch.zeros_like(v) for k, v in p.items()}
    v = {k: torch.zeros_like(u) for k, u in p.items()}
    out = []
    for step, (x, y) in enumerate(zip(xs, ys), 1):
        z = forward(p, x)
        picked = z.gather(1, y.reshape(-1, 1)).squeeze(1)
        loss = (z.logsumexp(1) - picked).sum() / len(z)
        out.append(loss.item())
        grads = torch.autograd.grad(loss, list(p.values()))
        with torch.no_grad():
            for k, g in zip(p, grads):
                m[k] = BETA1 * m[k] + (1 - BETA1) * g
                v[k] = BETA2 * v[k] + (1 - BETA2) * g * g
                mhat, vhat = m[k] / (1 - BETA1 ** step), v[k] / (1 - BETA2 ** step)
                p[k] -= LR * (mhat / (vhat.sqrt() + EPS) + DECAY * p[k])
    return np.array(out)


def losses32(model, xs, ys):
    opt = torch.optim.AdamW(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    out = []
    for x, y in zip(xs, ys):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y.flatten())
        loss.backward()
        opt.step()
        out.append(loss.item())
    return np.array(out)


def model_file(model, forward64, xs, ys):
    params = {k: v.detach().clone() for k, v in model.named_parameters()}
    f32, f64 = losses32(model, xs, ys), losses64(forward64, params, xs, ys)
    worst = float(np.max(np.abs(f32 - f64) / f64))
    print(f"  loss {f32[0]:.6f} -> {f32[-1]:.6f}, largest relative distance from float64 {worst:.1e}")
    assert worst < 2e-5, "float32 and float64 part too far for a 1e-4 test"
    return {**{"param/" + k: v for k, v in params.items()}, "x": xs, "y": ys, "losses": f32, "losses64": f64}


# ---- data --------------------------------------------------------------------------------------------------

def idx(name):
    with gzip.open(os.path.join(FASHION, name)) as f:
        buf = f.read()
    ndim = buf[3]
    return np.frombuffer(buf, np.uint8, offset=4 + 4 * ndim).reshape(struct.unpack_from(f">{ndim}I", buf, 4))


def cnn():
    n = STEPS * BATCH
    xs = torch.tensor(idx("train-images-idx3-ubyte.gz")[:n]).view(STEPS, BATCH, 1, 28, 28)
    ys = torch.tensor(idx("train-labels-idx1-ubyte.gz")[:n].astype(np.int64)).view(STEPS, BATCH)
    torch.manual_seed(1)
    return model_file(Cnn(), cnn64, xs, ys)


def mlp():
    g = torch.Generator().manual_seed(2)
    xs = torch.randn(STEPS, BATCH, 64, generator=g)
    ys = (xs @ torch.randn(64, 10, generator=g)).argmax(-1)  # a linear teacher: something to learn
    torch.manual_seed(2)
    return model_file(Mlp(), mlp64, xs, ys)


def transformer():
    """Each row counts up modulo 64 by a step of its own; one token in ten is replaced by a random one."""
    g = torch.Generator().manual_seed(3)
    b, t, vocab = 8, 32, 64
    start = torch.randint(0, vocab, (STEPS, b, 1), generator=g)
    step = torch.randint(1, 4, (STEPS, b, 1), generator=g)
    seq = (start + step * torch.arange(t + 1)) % vocab
    noise = torch.rand(seq.shape, generator=g) < 0.1
    seq = torch.where(noise, torch.randint(0, vocab, seq.shape, generator=g), seq)
    torch.manual_seed(3)
    return model_file(Transformer(), transformer64, seq[..., :-1].contiguous(), seq[..., 1:].contiguous())


# ---- single ops --------------------------------------------------------------------------------------------

class Ops:
    """Collects 'case/name' tensors; prints each case's largest distance from the same code in float64."""

    def __init__(self):
        self.tensors, self.g = {}, torch.Generator().manual_seed(4)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.g)

    def randint(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.g)

    def put(self, case, **values):
        self.tensors.update({f"{case}/{k}": v for k, v in values.items()})

    def grad(self, case, fn, inputs, dy=None, **attrs):
        """y = fn(*inputs), and for each input x its dx: the gradient of sum(y * dy), dy = 1 if None."""
        def both(dtype):
            leaves = [v.detach().clone().to(dtype).requires_grad_() for v in inputs.values()]
            y = fn(*leaves)
            seed = torch.ones_like(y) if dy is None else dy.to(dtype)
            return [y.detach(), *torch.autograd.grad(y, leaves, seed)]
        names = ["y"] + ["d" + k for k in inputs]
        single, double = both(torch.float32), both(torch.float64)
        if dy is not None:
            attrs["dy"] = dy
        self.put(case, **inputs, **attrs, **dict(zip(names, single)))
        self.report(case, single, double)

    @staticmethod
    def report(case, single, double):
        far = [((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item()
               for a, b in zip(single, double)]
        print(f"  {case:<22} largest distance from float64 {max(far):.1e}")
        assert max(far) < 1e-5, case


def ops():
    o = Ops()

    x = o.randn(5, 7, 33) * torch.rand(5, 7, 1, generator=o.g) * 3
    x[0, 0] += 10  # a row whose mean is large beside its spread
    o.grad("layer_norm", lambda x, w, b: F.layer_norm(x, (33,), w, b, 1e-5),
           {"x": x, "weight": 1 + 0.3 * o.randn(33), "bias": 0.3 * o.randn(33)}, o.randn(5, 7, 33), eps=1e-5)

    x = 4 * o.randn(4, 3, 17)
    x[0, 0, 3:9] = -math.inf  # as a mask leaves it
    x[1, 1] *= 50
    o.grad("softmax", lambda x: F.softmax(x, -1), {"x": x}, o.randn(4, 3, 17), dim=2)
    o.grad("softmax_dim1", lambda x: F.softmax(x, 1), {"x": 4 * o.randn(4, 9, 5)}, o.randn(4, 9, 5), dim=1)

    x = 3 * o.randn(9, 13)
    x[4] *= 40
    target = o.randint(0, 13, 9)
    o.grad("cross_entropy", lambda x: F.cross_entropy(x, target), {"x": x}, target=target)

    special = torch.tensor([0.0, -0.0, 20.0, -20.0, 1e-6, -1e-6])
    x = torch.cat([torch.linspace(-6, 6, 61), special, o.randn(60)])
    dy = o.randn(len(x))
    o.grad("gelu_erf", lambda x: F.gelu(x), {"x": x}, dy)
    o.grad("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), {"x": x}, dy)

    for case, (h, w, kh, kw, stride, pad) in {"conv2d": (9, 7, 3, 3, 2, 1), "conv2d_5x2": (8, 11, 5, 2, 2, 1),
                                              "conv2d_s1": (6, 6, 3, 3, 1, 1)}.items():
        x, wt, b = o.randn(2, 3, h, w), 0.3 * o.randn(4, 3, kh, kw), o.randn(4)
        dy = o.randn(*F.conv2d(x, wt, b, stride, pad).shape)
        o.grad(case, lambda x, wt, b: F.conv2d(x, wt, b, stride, pad), {"x": x, "weight": wt, "bias": b}, dy,
               stride=stride, pad=pad)

    for case, (k, stride) in {"max_pool2d_k2s2": (2, 2), "max_pool2d_k3s2": (3, 2)}.items():
        x = o.randint(0, 3, 2, 3, 7, 9).float()  # three values only: most windows hold a tie
        y, where = F.max_pool2d(x, k, stride, return_indices=True)
        o.grad(case, lambda x: F.max_pool2d(x, k, stride), {"x": x}, o.randn(*y.shape),
               kernel=k, stride=stride, indices=where)

    ids = torch.tensor([[3, 3, 0, 10, 3], [1, 0, 10, 10, 7], [7, 3, 2, 0, 3]])
    o.grad("embedding", lambda w: F.embedding(ids, w), {"weight": o.randn(11, 6)}, o.randn(3, 5, 6), ids=ids)

    q, k, v = (2 * o.randn(2, 3, 9, 8) for _ in range(3))
    o.grad("sdpa_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
           {"q": q, "k": k, "v": v}, o.randn(2, 3, 9, 8))

    x = o.randint(0, 3, 4, 6).float()
    o.grad("amax_dim1", lambda x: x.amax(1), {"x": x}, o.randn(4))
    o.grad("amax_all", lambda x: x.amax((0, 1)), {"x": x})
    o.grad("amax_3d_dim02", lambda x: x.amax((0, 2)), {"x": o.randint(0, 3, 3, 4, 5).float()}, o.randn(4))

    grads = o.randn(3, 37)
    grads[:, 0], grads[1, 1], grads[:, 2] = 0, 0, 1e3
    grads[:, 3] = torch.tensor([1e-9, -1e-9, 1e-9])  # below eps
    optimizer(o, "adamw", torch.optim.AdamW, o.randn(37), grads, dict(lr=1e-2, eps=1e-8, weight_decay=0.1),
              {"beta1": 0.9, "beta2": 0.999})
    optimizer(o, "sgd_nesterov", torch.optim.SGD, o.randn(37), o.randn(3, 37),
              dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), {})
    optimizer(o, "sgd_momentum", torch.optim.SGD, o.randn(37), o.randn(3, 37),
              dict(lr=0.1, momentum=0.9, weight_decay=0.01), {})
    return o.tensors


def optimizer(o, case, make, p0, grads, attrs, extra):
    """The parameter after each of the gradients' steps: p_after is (steps, n)."""
    def run(dtype):
        p = p0.clone().to(dtype).requires_grad_()
        opt, after = make([p], **attrs), []
        for g in grads:
            p.grad = g.to(dtype)
            opt.step()
            after.append(p.detach().clone())
        return torch.stack(after)
    single = run(torch.float32)
    numbers = {k: float(v) for k, v in attrs.items() if k != "nesterov"}
    o.put(case, p=p0, grads=grads, p_after=single, **numbers, **extra)
    o.report(case, [single], [run(torch.float64)])


# ---- main --------------------------------------------------------------------------------------------------

def compare(path, tensors):
    """Integers must be equal. Floats may differ by f32 rounding across CPUs, drawn ones included: PyTorch
    turns random bits into normals with vector code."""
    old, bad = read_file(path), []
    if list(old) != list(tensors):
        bad.append("the list of tensors")
    for name, value in tensors.items():
        new, was = to_array(value), old.get(name)
        if was is None:
            continue
        if new.dtype != was.dtype or new.shape != was.shape:
            bad.append(name)
            continue
        same = np.allclose(new, was, rtol=2e-5, atol=2e-6) if new.dtype.kind == "f" else (new == was).all()
        if not same:
            bad.append(name)
    return bad


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    ap = argparse.ArgumentParser(description="Golden vectors from PyTorch.")
    ap.add_argument("--out", default=os.path.join(here, "..", "tests", "golden"))
    ap.add_argument("--check", action="store_true", help="compare instead of writing")
    args = ap.parse_args()
    torch.set_num_threads(1)
    failed, total = False, 0
    for make in (cnn, mlp, transformer, ops):
        path = os.path.join(args.out, make.__name__ + ".bin")
        print(make.__name__)
        tensors = make()
        if args.check:
            bad = compare(path, tensors)
            failed |= bool(bad)
            print(f"  {'differs: ' + ', '.join(bad) if bad else 'as on disk'}")
        else:
            write_file(path, tensors)
        total += os.path.getsize(path)
    print(f"{total} bytes in all, PyTorch {torch.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
