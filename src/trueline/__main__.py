from trueline.cli import main

main()
