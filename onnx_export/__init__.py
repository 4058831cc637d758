"""Networks and their specs to ONNX files, quantised and checked."""
