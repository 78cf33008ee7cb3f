"""What the site draws and tabulates from the code, instead of being typed: run by conf.py before every build."""
