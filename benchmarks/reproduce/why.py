"""Why our figures differ from the paper's where they do: the reasons on docs/reproduction.md, by section."""

WHY = {
    "settings": "",
    "overview": "",
    "figure_3": "",
    "table_2": "",
    "figure_12": "",
    "figure_15": "",
    "large_job": "",
    "figure_10": "",
}
