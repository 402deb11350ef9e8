//! Activations that operators fuse into their epilogue.

/// Which form of GELU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Approximate {
    /// Exact: `0.5 x erfc(-x / sqrt 2)`.
    #[default]
    None,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    Tanh,
}

impl Approximate {
    /// `none` or `tanh`, as PyTorch calls them.
    pub const fn name(self) -> &'static str {
        match self {
            Approximate::None => "none",
            Approximate::Tanh => "tanh",
        }
    }
}

impl std::str::FromStr for Approximate {
    type Err = crate::Error;

    fn from_str(s: &str) -> crate::Result<Self> {
        match s {
            "none" | "exact" => Ok(Approximate::None),
            "tanh" => Ok(Approximate::Tanh),
            _ => Err(crate::Error::parameter("approximate", s, "none or tanh")),
        }
    }
}

/// What is applied to each element of an operator's result, after the bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    #[default]
    Identity,
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// `x / (1 + exp(-x))`, also called swish.
    Silu,
    /// [GELU](Approximate).
    Gelu(Approximate),
}

impl Activation {
    /// `identity`, `relu`, `silu`, `gelu` (exact) or `gelu_tanh`.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Identity => "identity",
            Activation::Relu => "relu",
            Activation::Silu => "silu",
            Activation::Gelu(Approximate::None) => "gelu",
            Activation::Gelu(Approximate::Tanh) => "gelu_tanh",
        }
    }

    /// Every activation, for tests and `verify`.
    pub const ALL: [Activation; 5] = [
        Activation::Identity,
        Activation::Relu,
        Activation::Silu,
        Activation::Gelu(Approximate::None),
        Activation::Gelu(Approximate::Tanh),
    ];
}

impl std::str::FromStr for Activation {
    type Err = crate::Error;

    fn from_str(s: &str) -> crate::Result<Self> {
        match s {
            "none" => Ok(Activation::Identity),
            "swish" => Ok(Activation::Silu),
            _ => Activation::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| {
                crate::Error::parameter(
                    "activation",
                    s,
                    "identity (none), relu, silu (swish), gelu or gelu_tanh",
                )
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for a in Activation::ALL {
            assert_eq!(a.name().parse::<Activation>().unwrap(), a);
        }
        assert_eq!("swish".parse::<Activation>().unwrap(), Activation::Silu);
        assert_eq!("exact".parse::<Approximate>().unwrap(), Approximate::None);
        assert!("mish".parse::<Activation>().is_err());
        assert!("erf".parse::<Approximate>().is_err());
    }
}
