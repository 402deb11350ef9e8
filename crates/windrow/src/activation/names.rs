//! The names of activations.

use super::{Activation, Approximate, NegativeSlope};
use crate::{Error, Result};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// 0.2 in f32.
const FIFTH: NegativeSlope = NegativeSlope(0.2f32.to_bits());

impl Activation {
    /// All activations, with two of the slopes that leaky ReLU may have.
    pub const ALL: &'static [Self] = &[
        Activation::Identity,
        Activation::Relu,
        Activation::Relu6,
        Activation::LeakyRelu(NegativeSlope::DEFAULT),
        Activation::LeakyRelu(FIFTH),
        Activation::Hardswish,
        Activation::Silu,
        Activation::Gelu(Approximate::None),
        Activation::Gelu(Approximate::Tanh),
    ];

    /// The name in configurations, in reports and on the command line. That of leaky ReLU has its slope, as in
    /// `leaky_relu(0.2)`, unless it is the default.
    pub fn name(self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Activation::Identity => "identity",
            Activation::Relu => "relu",
            Activation::Relu6 => "relu6",
            Activation::LeakyRelu(NegativeSlope::DEFAULT) => "leaky_relu",
            Activation::LeakyRelu(slope) => return Cow::Owned(format!("leaky_relu({slope})")),
            Activation::Hardswish => "hardswish",
            Activation::Silu => "silu",
            Activation::Gelu(Approximate::None) => "gelu",
            Activation::Gelu(Approximate::Tanh) => "gelu_tanh",
        })
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl FromStr for Activation {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let name = match s {
            "none" => "identity",
            "swish" => "silu",
            _ => s,
        };
        let known = || Activation::ALL.iter().copied();
        match (known().find(|a| a.name() == name), slope(name)) {
            (Some(known), _) => Ok(known),
            (None, Some(slope)) => Ok(Activation::LeakyRelu(NegativeSlope::new(slope)?)),
            (None, None) => {
                let names = known().map(Activation::name).collect::<Vec<_>>().join(", ");
                let expected = names + "; leaky_relu takes any finite slope";
                Err(Error::parameter("activation", s, expected))
            }
        }
    }
}

/// The slope in a name such as `leaky_relu(0.2)`.
fn slope(name: &str) -> Option<f32> {
    name.strip_prefix("leaky_relu(")?.strip_suffix(')')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for &a in Activation::ALL {
            assert_eq!(a.name().parse::<Activation>().unwrap(), a);
            assert_eq!(a.to_string(), a.name());
        }
        assert_eq!("swish".parse::<Activation>().unwrap(), Activation::Silu);
        assert_eq!("none".parse::<Activation>().unwrap(), Activation::Identity);
        assert!("mish".parse::<Activation>().is_err());
        assert_eq!("exact".parse::<Approximate>().unwrap(), Approximate::None);
        assert!("erf".parse::<Approximate>().is_err());
    }

    #[test]
    fn names_of_leaky_relu_have_their_slope() {
        let leaky = |slope| Activation::LeakyRelu(NegativeSlope::new(slope).unwrap());
        assert_eq!(leaky(0.01).name(), "leaky_relu");
        for (slope, name) in [
            (0.2, "leaky_relu(0.2)"),
            (0.0, "leaky_relu(0)"),
            (1.0, "leaky_relu(1)"),
            (-0.5, "leaky_relu(-0.5)"),
            (1.5, "leaky_relu(1.5)"),
        ] {
            assert_eq!(leaky(slope).name(), name);
        }
        for slope in [f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, -1.0 / 3.0, 0.010000001] {
            assert_eq!(leaky(slope).name().parse(), Ok(leaky(slope)));
        }
        for (name, slope) in [("(2e-1)", 0.2), ("(-0.0)", 0.0), ("(+1)", 1.0), ("(0.0100)", 0.01)] {
            assert_eq!(format!("leaky_relu{name}").parse(), Ok(leaky(slope)));
        }
    }

    #[test]
    fn wrong_names_are_typed_errors() {
        let name_of = |s: &str| match s.parse::<Activation>().unwrap_err() {
            Error::Parameter { name, expected, .. } => (name, expected),
            error => panic!("{s}: {error}"),
        };
        for s in
            ["", "leaky_relu()", "leaky_relu(0.2", "leaky_relu(a)", "leaky_relu(0.2) ", "relu(0.2)"]
        {
            let (name, expected) = name_of(s);
            assert_eq!(name, "activation", "{s}");
            for &a in Activation::ALL {
                assert!(expected.contains(&*a.name()), "{a}");
            }
        }
        for s in ["leaky_relu(inf)", "leaky_relu(NaN)", "leaky_relu(-1e39)"] {
            assert_eq!(name_of(s).0, "negative_slope", "{s}");
        }
    }
}
