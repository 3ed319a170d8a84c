"""The cockpit: experiments on the running cluster, on one of their own and in the simulator, with live charts, and the calculators, on a
page of its own."""
