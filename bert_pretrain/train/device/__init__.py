"""What the machine offers: device, precision, memory, peak rates, hints."""
