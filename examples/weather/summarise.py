import csv
from collections import defaultdict
from statistics import mean


def main(path, year):
    """What an agent writes when it is asked: how was the weather in Seattle that year?"""
    months = defaultdict(list)
    with open(path, newline="") as file:
        for day in csv.DictReader(file):
            if day["date"].startswith(f"{year}/"):
                months[int(day["date"].split("/")[1])].append(day)
    summary = [
        {
            "month": month,
            "rain_mm": round(sum(float(day["precipitation"]) for day in days), 1),
            "mean_high_c": round(mean(float(day["temp_max"]) for day in days), 1),
            "days": len(days),
        }
        for month, days in sorted(months.items())
    ]
    with open("artifacts/summary.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, summary[0])
        writer.writeheader()
        writer.writerows(summary)
    with open("artifacts/rain.svg", "w") as file:
        file.write(chart(summary, f"Seattle {year}: rain per month (mm), mean high (°C)"))
    wettest = max(summary, key=lambda row: row["rain_mm"])
    print(f"{sum(row['days'] for row in summary)} days read from {path}")
    return {"year": year, "wettest_month": wettest["month"], "months": summary}


def chart(summary, title):
    """Bars for the rain and a line for the temperature, as SVG."""
    width, height, left, bottom = 640, 320, 40, 290
    step = (width - left - 10) / len(summary)
    most = max(row["rain_mm"] for row in summary)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18" font-size="14">{title}</text>',
    ]
    points = []
    for index, row in enumerate(summary):
        x = left + index * step
        bar = row["rain_mm"] / most * 230
        parts.append(
            f'<rect x="{x:.1f}" y="{bottom - bar:.1f}" width="{step * 0.7:.1f}" '
            f'height="{bar:.1f}" fill="#4c78a8"/>'
            f'<text x="{x + step * 0.35:.1f}" y="{bottom - bar - 4:.1f}" text-anchor="middle">'
            f"{row['rain_mm']:.0f}</text>"
            f'<text x="{x + step * 0.35:.1f}" y="{bottom + 14}" text-anchor="middle">'
            f"{row['month']}</text>"
        )
        points.append(f"{x + step * 0.35:.1f},{bottom - row['mean_high_c'] * 7:.1f}")
    line = " ".join(points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#e45756" stroke-width="2"/></svg>')
    return "\n".join(parts)
