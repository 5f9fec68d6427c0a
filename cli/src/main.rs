//! The `switchyard` binary.

fn main() -> std::process::ExitCode {
    switchyard_cli::run()
}
