"""Models as SavedModel and ONNX, each checked against the model before it is called done."""

from tfdist.utils.imports import lazy_attributes

__all__ = [
    "Comparison",
    "Difference",
    "ExportError",
    "Input",
    "Report",
    "Score",
    "compare",
    "export",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Comparison": "tfdist.exporting.comparison",
        "Difference": "tfdist.exporting.comparison",
        "ExportError": "tfdist.exporting.subject",
        "Input": "tfdist.exporting.subject",
        "Report": "tfdist.exporting.exporter",
        "Score": "tfdist.exporting.precision",
        "compare": "tfdist.exporting.exporter",
        "export": "tfdist.exporting.exporter",
    },
)
