"""Exports networks to ONNX files, quantises and checks them."""
