"""What every measurement needs: timings that pair, the machine, its ceilings, intervals."""
