def degrees(text, whole):
    sign = -1 if text[0] == "-" else 1
    parts = (text[1 : 1 + whole], text[1 + whole : 3 + whole], text[3 + whole :] or "0")
    return sign * sum(int(part) / 60**n for n, part in enumerate(parts))


def locate(text):
    """Latitude and longitude, of +4230+00131 as of -690022+0393524."""
    middle = 5 if len(text) == 11 else 7
    return degrees(text[:middle], 2), degrees(text[middle:], 3)


places = {row["zone"]: locate(row["coordinates"]) for row in rows}
print(f"{len(places)} places")
