"""Your own torch module as the encoder: anything from images to (batch, d)."""

from pathlib import Path
from tempfile import mkdtemp

from torch import nn

import oneflare

encoder = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
)  # fmt: skip
result = oneflare.run(data="digits", encoder=encoder, clients=3, alpha=0.3, epochs=4, out=Path(mkdtemp()) / "run")
model = result.model(encoder=encoder)  # its code is not in the file, so it is given again
print(f"{result.headline}: {100 * result.accuracy:.1f} %, {model.cost.parameters:,} parameters in all members")
