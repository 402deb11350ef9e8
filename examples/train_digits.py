"""Trains a small CNN on scikit-learn's handwritten digits, with Windrow and with plain PyTorch.

Both nets start from the same weights and see the same batches. Printed: test accuracy and the time
of a training step. Exits with an error below 98 % test accuracy.

    python examples/train_digits.py
"""

import statistics
import time

import torch
import torch.nn.functional as F
import windrow.torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

EPOCHS, BATCH = 20, 64


def net(conv2d: type[nn.Conv2d], gelu: type[nn.GELU]) -> nn.Sequential:
    """Three 3x3 convolutions on 8x8 images of one channel."""
    return nn.Sequential(
        conv2d(1, 32, 3, padding=1),
        gelu("tanh"),
        conv2d(32, 64, 3, padding=1),
        gelu("tanh"),
        nn.MaxPool2d(2),
        conv2d(64, 128, 3, padding=1),
        gelu("tanh"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [n, 1, 8, 8] in 0..1 and labels, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
        torch.tensor(labels),
        test_size=0.25,
        random_state=0,
        stratify=labels,
    )
    return tuple(parts)


class Training:
    """A net on its way, and what its steps took."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS)
        self.times: list[float] = []

    def step(self, x: Tensor, label: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), label).backward()
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)


def main() -> None:
    """Trains both nets batch by batch in turn, so that both meet the same machine."""
    torch.manual_seed(0)
    x, test_x, label, test_label = digits()
    plain = net(nn.Conv2d, nn.GELU)
    ours = net(windrow.torch.Conv2d, windrow.torch.GELU)
    ours.load_state_dict(plain.state_dict())
    trainings = {"windrow": Training(ours), "torch": Training(plain)}
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            for training in trainings.values():
                training.step(x[batch], label[batch])
        for training in trainings.values():
            training.schedule.step()
    accuracies = []
    for name, training in trainings.items():
        training.model.eval()
        with torch.no_grad():
            accuracy = (training.model(test_x).argmax(1) == test_label).double().mean().item()
        step = statistics.median(training.times) * 1e3
        print(f"{name:8} test accuracy {accuracy:7.2%}, {step:.2f} ms a step")
        accuracies.append(accuracy)
    if min(accuracies) < 0.98:
        raise SystemExit("below 98 %")


if __name__ == "__main__":
    main()
