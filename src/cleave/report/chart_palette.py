"""Colors of charts, on light and on dark pages. The first line is Cleave's; greys are clouds'."""

from __future__ import annotations

LIGHT = ("#d62728", "#1f5fa8", "#e07b00", "#2a8a3e", "#8250c4", "#a2611f", "#c2419b", "#13888c", "#6b7a00", "#555ed6")
DARK = ("#ff6b5e", "#6fb1ff", "#ffb454", "#6fd384", "#c3a0ff", "#d9a066", "#ff8fd0", "#4fd3d6", "#c9d64a", "#a3a9ff")
GREY = {"light": ("#3a3a3a", "#767676", "#9a9a9a", "#b5b5b5"), "dark": ("#e0e0e0", "#b0b0b0", "#8d8d8d", "#707070")}
