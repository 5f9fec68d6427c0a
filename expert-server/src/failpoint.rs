//! Named places where fault tests make the server wait, panic or misbehave.
//!
//! Without the feature `failpoints` both macros expand to nothing: no call, no name, no branch.

/// Runs the action that a test configured for the failpoint `$name`.
#[cfg(feature = "failpoints")]
macro_rules! failpoint {
    ($name:literal) => {
        ::fail::fail_point!($name)
    };
}

#[cfg(not(feature = "failpoints"))]
macro_rules! failpoint {
    ($name:literal) => {};
}

/// Runs `$wrong` if a test configured the failpoint `$name` as `return`: deliberately wrong behaviour, which
/// shows that the fault rig notices it.
#[cfg(feature = "failpoints")]
macro_rules! sabotage {
    ($name:literal, $wrong:block) => {
        if (|| {
            ::fail::fail_point!($name, |_| true);
            false
        })() $wrong
    };
}

#[cfg(not(feature = "failpoints"))]
macro_rules! sabotage {
    ($name:literal, $wrong:block) => {};
}
