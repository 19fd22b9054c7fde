import csv

with open("zones.csv") as file:
    rows = list(csv.DictReader(file))
print(f"{len(rows)} time zones in {len({row['country'] for row in rows})} countries")
rows[0]
