"""Uploads that lie in a folder become models, without training; then one client is forgotten, exactly."""

from pathlib import Path
from tempfile import mkdtemp

import oneflare
from oneflare.simulation.stages import fuse_run

folder = Path(mkdtemp()) / "run"
oneflare.run(data="digits", clients=4, alpha=0.3, epochs=3, fusions="count_prototypes", out=folder)
print(
    "uploads:", ", ".join(str(path.relative_to(folder)) for path in sorted(folder.glob("clients/*/upload.safetensors")))
)

result = fuse_run(folder, [{"name": "ensemble"}, {"name": "average"}])
for name, row in result.fusions.items():
    print(f"{name:18} {100 * row.accuracy:5.1f} %, {row.forward_passes} passes per image")
