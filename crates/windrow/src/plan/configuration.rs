//! Configurations as text, such as `winograd_gemm_f4 tiles=36 vectors=4`, and helper functions for the keys of the
//! tuning tables.

use crate::{Error, Layout, Result, TensorDesc};
use std::fmt;

/// Writes an algorithm and those of its parameters that are set.
pub(crate) fn write(
    f: &mut fmt::Formatter<'_>,
    algorithm: &str,
    parameters: impl IntoIterator<Item = (&'static str, Option<usize>)>,
) -> fmt::Result {
    f.write_str(algorithm)?;
    for (name, value) in parameters {
        if let Some(value) = value {
            write!(f, " {name}={value}")?;
        }
    }
    Ok(())
}

/// The algorithm's name, and the values of the parameters with these `names`.
///
/// # Errors
/// [`Error::Parameter`] if the text has a parameter that is not in `names`, a parameter twice, or a value that is not a
/// positive number.
pub(crate) fn parse<'a, const N: usize>(
    text: &'a str,
    names: [&str; N],
) -> Result<(&'a str, [Option<usize>; N])> {
    let mut words = text.split_whitespace();
    let bad = |word: &str| {
        let expected = format!("an algorithm and NAME=NUMBER of {}", names.join(", "));
        Error::parameter("configuration", format!("`{text}` (at `{word}`)"), expected)
    };
    let algorithm = words.next().ok_or_else(|| bad(""))?;
    let mut values = [None; N];
    for word in words {
        let (name, value) = word.split_once('=').ok_or_else(|| bad(word))?;
        let at = names.iter().position(|n| *n == name).ok_or_else(|| bad(word))?;
        let value = value.parse().ok().filter(|&v: &usize| v > 0).ok_or_else(|| bad(word))?;
        if values[at].replace(value).is_some() {
            return Err(bad(word));
        }
    }
    Ok((algorithm, values))
}

/// Declares an operator's configuration: an algorithm and its parameters. A parameter is `None` if the cost model
/// chooses it, or if the algorithm does not have it. `Self::check_parameters` rejects parameters with which the
/// algorithm cannot run.
macro_rules! configuration {
    ($(#[$doc:meta])* $name:ident: $algorithm:ident { $($(#[$what:meta])* $parameter:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub struct $name {
            /// The algorithm.
            pub algorithm: $algorithm,
            $($(#[$what])* pub $parameter: Option<usize>,)*
        }

        impl $name {
            /// An algorithm with the cost model's parameters.
            pub const fn new(algorithm: $algorithm) -> Self {
                $name { algorithm, $($parameter: None),* }
            }

            pub(crate) fn parameters(&self) -> impl Iterator<Item = (&'static str, Option<usize>)> + use<> {
                [$((stringify!($parameter), self.$parameter)),*].into_iter()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::plan::configuration::write(f, self.algorithm.name(), self.parameters())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::Error;

            fn from_str(s: &str) -> $crate::Result<Self> {
                let names = [$(stringify!($parameter)),*];
                let (algorithm, [$($parameter),*]) = $crate::plan::configuration::parse(s, names)?;
                Ok($name { algorithm: algorithm.parse()?, $($parameter),* })
            }
        }

        impl $crate::plan::Configuration for $name {
            type Algorithm = $algorithm;

            fn of(algorithm: $algorithm) -> Self {
                Self::new(algorithm)
            }

            fn algorithm(&self) -> $algorithm {
                self.algorithm
            }

            fn threads(&self) -> Option<usize> {
                self.parameters().find(|(name, _)| *name == "threads")?.1
            }

            fn check(&self, options: &$crate::PlanOptions) -> $crate::Result<()> {
                $name::check_parameters(self, options)
            }
        }
    };
}

pub(crate) use configuration;

/// A dense tensor whose dimensions are in the same order as those of `desc`.
pub(crate) fn dense(desc: &TensorDesc) -> Result<TensorDesc> {
    let mut order: Vec<usize> = (0..desc.shape().len()).collect();
    order.sort_by_key(|&d| std::cmp::Reverse(desc.strides()[d].unsigned_abs()));
    Ok(TensorDesc { dtype: desc.dtype, layout: Layout::with_order(desc.shape(), &order)? })
}

/// Sizes in the form of a key: `64x3x112x112`.
pub(crate) fn joined(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Text([Option<usize>; 2]);

    impl fmt::Display for Text {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write(f, "name", [("tiles", self.0[0]), ("threads", self.0[1])])
        }
    }

    #[test]
    fn text_parses_back() {
        for values in [[None, None], [Some(3), None], [None, Some(4)], [Some(1), Some(2)]] {
            let text = Text(values).to_string();
            assert_eq!(parse(&text, ["tiles", "threads"]).unwrap(), ("name", values), "{text}");
        }
        assert_eq!(Text([Some(36), Some(2)]).to_string(), "name tiles=36 threads=2");
    }

    #[test]
    fn bad_words_are_named() {
        for (text, word) in [
            ("", "``"),
            ("name tiles", "`tiles`"),
            ("name tiles=", "`tiles=`"),
            ("name tiles=0", "`tiles=0`"),
            ("name tiles=-1", "`tiles=-1`"),
            ("name blocks=1", "`blocks=1`"),
            ("name tiles=1 tiles=1", "(at `tiles=1`)"),
        ] {
            let message = parse(text, ["tiles", "threads"]).unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("tiles, threads"), "{message}");
        }
    }
}
