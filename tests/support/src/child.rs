//! Processes of a test binary: functions that run in a process of their own, and are no tests.
//!
//! ```no_run
//! # fn serve() {}
//! switchyard_test_support::child_processes! { "server" => serve }
//!
//! let mut server = switchyard_test_support::child::command("server").spawn().unwrap();
//! ```
//!
//! The process is the test binary, called anew. A constructor of the binary finds the name in the environment and
//! runs the function before `main`. The test harness never starts there: it prints nothing and takes no arguments.
//! Constructors of C++ that is linked into the binary may not have run yet.

use std::panic::catch_unwind;
use std::process::{Command, exit};

/// Environment variable with the name of the process.
const VARIABLE: &str = "SWITCHYARD_TEST_CHILD";

/// Declares the processes of a test binary, once, in its root: names, and functions without arguments. A process
/// exits with 0 when its function returns, and with 101 when it panics.
#[macro_export]
macro_rules! child_processes {
    ($($name:literal => $run:expr),+ $(,)?) => {
        const _: () = {
            extern "C" fn enter() {
                $crate::child::enter(&[$(($name, $run)),+]);
            }
            // SAFETY: the C runtime calls every function in this section once, before `main`.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static ENTER: extern "C" fn() = enter;
        };
    };
}

/// A command that starts this binary as its process `name`. Arguments are free for the process.
///
/// # Panics
/// When the path of this binary is unknown.
#[must_use]
pub fn command(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the path of this binary"));
    command.envs(variables(name));
    command
}

/// The environment that makes this binary its process `name`, for a command that is built in another way.
#[must_use]
pub fn variables(name: &str) -> [(&'static str, &str); 1] {
    [(VARIABLE, name)]
}

/// Runs the process that the environment names, and exits. Returns if it names none. For
/// [`child_processes`].
pub fn enter(processes: &[(&str, fn())]) {
    let Ok(name) = std::env::var(VARIABLE) else { return };
    // SAFETY: before `main` there is one thread.
    unsafe { std::env::remove_var(VARIABLE) };
    // As Rust's own start does: a write into a closed pipe is an error, not the end of the process.
    // SAFETY: the constant is a valid action for this signal.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let Some((_, run)) = processes.iter().find(|(known, _)| *known == name) else {
        eprintln!("this binary has no process `{name}`");
        exit(2);
    };
    exit(if catch_unwind(run).is_ok() { 0 } else { 101 });
}
