"""Your own arrays, one pair per organisation: who owns what is given, nothing is partitioned."""

from pathlib import Path
from tempfile import mkdtemp

import torch
from sklearn.datasets import load_digits

import oneflare

images, labels = load_digits(return_X_y=True)
images = (images * 255 / 16).astype("uint8").reshape(-1, 8, 8)

# Three organisations that see different digits; the last 300 images are nobody's.
owners = []
for digits in ((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9)):
    mine = [row for row in range(len(labels) - 300) if labels[row] in digits]
    owners.append((images[mine], labels[mine]))

result = oneflare.run(data=owners, test=(images[-300:], labels[-300:]), epochs=4, out=Path(mkdtemp()) / "run")
for name, row in sorted(result.fusions.items(), key=lambda item: -item[1].accuracy):
    print(f"{name:18} {100 * row.accuracy:5.1f} %")

model = result.model()
answer = model.predict_proba(torch.from_numpy(images[-1:])[:, None])[0]
print(f"the last image is a {labels[-1]}; the model says {int(answer.argmax())} with {100 * float(answer.max()):.0f} %")
