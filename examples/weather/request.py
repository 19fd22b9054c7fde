"""Prints the request: the code beside this file, the data it reads, and what main() is given."""

import base64
import json
from pathlib import Path

here = Path(__file__).parent
data = (here / "seattle-weather.csv").read_bytes()
print(
    json.dumps(
        {
            "code": (here / "summarise.py").read_text(),
            "language": "python",
            "entrypoint": "main",
            "arguments": {"path": "seattle-weather.csv", "year": 2015},
            "files": [
                {"path": "seattle-weather.csv", "content_base64": base64.b64encode(data).decode()}
            ],
        }
    )
)
