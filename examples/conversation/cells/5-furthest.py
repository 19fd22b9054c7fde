import json

found = {"north": max(places, key=places.get), "south": min(places, key=places.get)}
with open("furthest.json", "w") as file:
    json.dump(found, file)
found
