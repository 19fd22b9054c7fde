# Degrees and minutes, such as +4230+00131. Some rows have seconds, so this one fails.
places = {}
for row in rows:
    text = row["coordinates"]
    if len(text) != 11:
        raise ValueError(f"{row['zone']}: {text}")
    places[row["zone"]] = (int(text[:3]) + int(text[3:5]) / 60, int(text[5:9]) + int(text[9:]) / 60)
