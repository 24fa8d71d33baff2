"""Policy gradients, in the style of pytorch/examples reinforcement_learning: one small call for each step."""

from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

torch.manual_seed(543)
if torch.cuda.is_available():
    torch.set_default_device("cuda")


class Corridor:
    """Walk right to the end of a corridor of 5 cells within 12 steps."""

    def reset(self):
        self.place, self.steps = 0, 0
        return self.place

    def step(self, action):
        self.place = max(0, self.place + (1 if action == 1 else -1))
        self.steps += 1
        done = self.place == 4 or self.steps == 12
        return self.place, 1.0 if self.place == 4 else -0.1, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(5, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=3e-2)
eps = 1e-7
env, scores = Corridor(), []
for _episode in range(40):
    state, done = env.reset(), False
    while not done:
        probs = policy(F.one_hot(torch.tensor([state]), 5).float())
        m = Categorical(probs)
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        state, reward, done = env.step(action.item())
        policy.rewards.append(reward)
    R, returns = 0.0, deque()
    for r in policy.rewards[::-1]:
        R = r + 0.9 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    loss = torch.cat([-p * R for p, R in zip(policy.saved_log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scores.append(sum(policy.rewards))
    del policy.rewards[:], policy.saved_log_probs[:]
print(f"first {sum(scores[:10]) / 10:.2f} last {sum(scores[-10:]) / 10:.2f}")
assert sum(scores[-10:]) > sum(scores[:10])
assert next(policy.parameters()).is_cuda == torch.cuda.is_available()
