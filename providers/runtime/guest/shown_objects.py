"""Values that are shown as what they say they are, as `IPython.display` has them."""

import html
import mimetypes
import os

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any

__all__ = (
    *("DisplayObject", "TextDisplayObject", "HTML", "Markdown", "Latex", "Math", "SVG", "JSON"),
    *("GeoJSON", "Javascript", "Pretty", "Code", "Image", "Audio", "Video", "IFrame", "FileLink"),
    *("FileLinks", "YouTubeVideo", "ProgressBar"),
)

_IMAGES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


class DisplayObject:
    """Data, or a file with it; `mime` is what it is shown as."""

    mime = "text/plain"

    def __init__(
        self,
        data: "Any" = None,
        url: "str | None" = None,
        filename: "str | None" = None,
        metadata: "Any" = None,
        **options: "Any",
    ) -> None:
        if url is None and filename is None and _is_url(data):
            url, data = data, None
        elif filename is None and self._is_file(data):
            filename, data = os.fspath(data), None
        self.data, self.url, self.filename = data, url, filename
        self.metadata = metadata or {}
        self.options = options
        self.reload()

    def reload(self) -> None:
        if self.filename is not None:
            with open(self.filename, "rb") as file:
                content = file.read()
            self.data = self._read(content)

    def _is_file(self, data: "Any") -> bool:
        return isinstance(data, os.PathLike)

    def _read(self, content: bytes) -> "Any":
        return content.decode("utf-8", "replace")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        return {} if self.data is None else {self.mime: self.data}

    def __repr__(self) -> str:
        return f"<IPython.core.display.{type(self).__name__} object>"


class TextDisplayObject(DisplayObject):
    pass


class HTML(TextDisplayObject):
    mime = "text/html"

    def _repr_html_(self) -> "Any":
        return self.data

    def __html__(self) -> "Any":
        return self.data


class Markdown(TextDisplayObject):
    mime = "text/markdown"


class Latex(TextDisplayObject):
    mime = "text/latex"


class Math(Latex):
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        return {self.mime: f"$\\displaystyle {str(self.data).strip('$')}$"}


class SVG(DisplayObject):
    mime = "image/svg+xml"

    def _is_file(self, data: "Any") -> bool:
        return super()._is_file(data) or _is_path(data, "<")


class JSON(DisplayObject):
    mime = "application/json"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        import json

        data = json.loads(self.data) if isinstance(self.data, str) else self.data
        return {} if data is None else {self.mime: data}


class GeoJSON(JSON):
    mime = "application/geo+json"


class Javascript(TextDisplayObject):
    mime = "application/javascript"


class Pretty(TextDisplayObject):
    def __repr__(self) -> str:
        return str(self.data)


class Code(TextDisplayObject):
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        return {"text/html": f"<pre>{html.escape(str(self.data))}</pre>"}

    def __repr__(self) -> str:
        return str(self.data)


class Image(DisplayObject):
    """A raster image, or the place of one elsewhere."""

    def _is_file(self, data: "Any") -> bool:
        return super()._is_file(data) or isinstance(data, str)

    def _read(self, content: bytes) -> "Any":
        return content

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        if self.data is None:
            sizes = "".join(
                f' {name}="{html.escape(str(self.options[name]))}"'
                for name in ("width", "height")
                if self.options.get(name)
            )
            return {"text/html": f'<img src="{html.escape(self.url or "")}"{sizes}/>'}
        given = self.options.get("format") or "png"
        start = bytes(self.data[:4])
        usual = f"image/{'jpeg' if given == 'jpg' else given}"
        mime = next((of for mark, of in _IMAGES.items() if start.startswith(mark)), usual)
        return {mime: self.data}


class _Player(DisplayObject):
    """A file that a browser plays: in the page where it is here, else from its place."""

    tag = ""
    usual = ""

    def _is_file(self, data: "Any") -> bool:
        return super()._is_file(data) or isinstance(data, str)

    def _read(self, content: bytes) -> "Any":
        return content

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        source = self.url or ""
        if isinstance(self.data, (bytes, bytearray)):
            import base64

            kind = mimetypes.guess_type(self.filename or "")[0] or self.usual
            source = f"data:{kind};base64,{base64.b64encode(self.data).decode()}"
        return {"text/html": f'<{self.tag} controls src="{html.escape(source)}"></{self.tag}>'}


class Audio(_Player):
    """Sound; also samples, an array of one channel or of some, with their `rate`."""

    tag, usual = "audio", "audio/wav"

    def __init__(self, data: "Any" = None, *args: "Any", rate: int = 0, **options: "Any") -> None:
        if rate and data is not None and not isinstance(data, (str, bytes)):
            data = _wave(data, rate)
        super().__init__(data, *args, **options)


class Video(_Player):
    tag, usual = "video", "video/mp4"


class IFrame(DisplayObject):
    mime = "text/html"

    def __init__(self, src: str, width: "Any" = "100%", height: "Any" = 400, **_: "Any") -> None:
        super().__init__(
            f'<iframe src="{html.escape(src)}" width="{width}" height="{height}"></iframe>'
        )


class YouTubeVideo(IFrame):
    def __init__(self, id: str, width: "Any" = 400, height: "Any" = 300, **_: "Any") -> None:  # noqa: A002
        super().__init__(f"https://www.youtube.com/embed/{id}", width, height)


class FileLink(DisplayObject):
    mime = "text/html"

    def __init__(self, path: str, **_: "Any") -> None:
        self.path = os.fspath(path)
        shown = html.escape(self.path)
        super().__init__(f"<a href='{shown}' target='_blank'>{shown}</a>")

    def __repr__(self) -> str:
        return os.path.abspath(self.path)


class FileLinks(DisplayObject):
    mime = "text/html"

    def __init__(self, path: str, **_: "Any") -> None:
        names = sorted(os.listdir(path))
        super().__init__("<br>".join(html.escape(os.path.join(path, name)) for name in names))


class ProgressBar(DisplayObject):
    mime = "text/html"

    def __init__(self, total: int) -> None:
        self.total, self.progress = total, 0
        super().__init__("")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> "Any":
        return {"text/html": f"<progress max='{self.total}' value='{self.progress}'></progress>"}

    def __repr__(self) -> str:
        return f"{self.progress}/{self.total}"


def _is_url(data: "Any") -> bool:
    return isinstance(data, str) and data[:8].lower().startswith(("http://", "https://"))


def _is_path(data: "Any", start: str) -> bool:
    return isinstance(data, str) and not data.lstrip().startswith(start) and os.path.exists(data)


def _wave(samples: "Any", rate: int) -> bytes:
    import io
    import struct
    import wave

    rows = samples.tolist() if hasattr(samples, "tolist") else list(samples)
    channels = rows if rows and isinstance(rows[0], list) else [rows]
    largest = max((abs(each) for channel in channels for each in channel), default=0) or 1
    mixed = [int(each / largest * 32767) for frame in zip(*channels) for each in frame]
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(struct.pack(f"<{len(mixed)}h", *mixed))
    return buffer.getvalue()
