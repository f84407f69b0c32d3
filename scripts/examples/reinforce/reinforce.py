"""REINFORCE with a baseline (Williams 1992): a policy balances a pole on a cart.

There is no dataset: each sample is a seed, by which an episode is drawn. So episodes are the same
on any number of workers.
"""

import torch
from torch import nn

import expt


class Policy(nn.Sequential):
    """Logits of a push to the left and to the right, and the expected return."""

    def __init__(self, width):
        super().__init__(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def drawn(seeds, size):
    """Return numbers in [0, 1) for each seed [seeds, size]."""
    generators = (torch.Generator().manual_seed(seed) for seed in seeds.tolist())
    return torch.stack([torch.rand(size, generator=one) for one in generators]).to(seeds.device)


def push(state, right):
    """Return position, speed, angle and spin 0.02 s later, as in Gymnasium's CartPole."""
    _, speed, angle, spin = state.unbind(1)
    force = torch.where(right, 10.0, -10.0) + 0.05 * spin**2 * angle.sin()
    turn = 9.8 * angle.sin() - angle.cos() * force / 1.1
    turn = turn / (2 / 3 - 0.05 * angle.cos() ** 2 / 1.1)
    pull = (force - 0.05 * turn * angle.cos()) / 1.1
    return state + 0.02 * torch.stack([speed, pull, spin, turn], 1)


class Reinforce(expt.Task):
    """Of each step that the pole still stands the log-probability of its push times its gain."""

    def __init__(self, length, discount):
        self.length, self.discount = length, discount

    def forward(self, model, batch):
        noise = drawn(batch.inputs, 4 + self.length)
        states, pushes, stands = [noise[:, :4] / 10 - 0.05], [], []
        with torch.no_grad():
            for uniform in noise[:, 4:].unbind(1):
                limit = 0.5 if batch.progress.is_evaluation else uniform  # the best push, or any
                pushes.append(model(states[-1])[:, :2].softmax(1)[:, 1] > limit)
                in_place = (states[-1][:, 0].abs() < 2.4) & (states[-1][:, 2].abs() < 0.2095)
                stands.append(in_place & (stands[-1] if stands else True))
                moved = push(states[-1], pushes[-1])
                states.append(torch.where(stands[-1][:, None], moved, states[-1]))
        outputs = model(torch.stack(states[:-1], 1).flatten(0, 1)).view(-1, self.length, 3)
        right, stands = (torch.stack(each, 1) for each in (pushes, stands))
        chosen = outputs[..., :2].log_softmax(2).gather(2, right.long()[..., None])[..., 0]
        return {"chosen": chosen, "expected": outputs[..., 2], "stands": stands.float()}

    def loss(self, outputs, batch):
        stands, returns = outputs["stands"], [torch.zeros(batch.size, device=batch.inputs.device)]
        for standing in stands.flip(1).unbind(1):
            returns.append((1 - self.discount) * standing + self.discount * returns[-1])
        gain = torch.stack(returns[:0:-1], 1) - outputs["expected"]
        return (stands * (gain**2 / 2 - gain.detach() * outputs["chosen"])).sum(), stands.sum()

    def measure(self, outputs, batch):
        return {"steps": (outputs["stands"].sum(), batch.size)}
